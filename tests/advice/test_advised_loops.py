"""Loops under `bb.advise`: what it measures, that they train as alone, and what it leaves."""

import gc
import math
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, optimizer as optimizers

import bigbatch as bb
from bigbatch.random_states import random_state
