"""Lightning's tutorial of a classifier, with class weights and labels that are left out."""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, UNLABELLED = 3, -100

draw = torch.Generator().manual_seed(1)
features = torch.randn(96, 6, generator=draw, dtype=torch.float64)
labels = (features[:, 0] > 0.5).long() + (features[:, 1] > 1).long()
labels[torch.rand(96, generator=draw) < 0.4] = UNLABELLED
labels[8:13] = UNLABELLED


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES)).double()
        self.register_buffer("class_weights", torch.tensor([1.0, 2.0, 30.0]).double())

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y, weight=self.class_weights)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


torch.manual_seed(0)
model = LitClassifier()
loader = DataLoader(TensorDataset(features, labels), batch_size=24)
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader)
torch.save(model.state_dict(), sys.argv[1])
