"""The published data sets: their files, and where to get them."""

from bigbatch_recipes.datasets.files import DatasetLocation

VOCAB = "vocab.txt"  # may lie in the folder of a text
CRITEO_FILES = ("train.txt", "train.txt.gz", "criteo_kaggle_rows.tsv.gz")  # Kaggle's, or a part
SQUAD_TRAIN, SQUAD_DEV = "train-v1.1.json", "dev-v1.1.json"

FASHION_MNIST = DatasetLocation(
    name="Fashion-MNIST",
    folders=("fashion-mnist", "FashionMNIST/raw"),
    files=("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
    other_files=(
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ),
    source="Zalando Research, github.com/zalandoresearch/fashion-mnist",
    size="70,000 images of 28 x 28 in 10 classes, 29 MiB",
)

CIFAR10 = DatasetLocation(
    name="CIFAR-10",
    folders=("cifar10", "cifar-10-batches-py"),
    files=("data_batch_1",),
    other_files=("data_batch_2 to data_batch_5", "test_batch"),
    source="the version for Python of CIFAR-10, cs.toronto.edu/~kriz/cifar.html",
    size="60,000 images of 32 x 32 in 10 classes, 178 MiB",
)

IMAGENET = DatasetLocation(
    "ImageNet",
    folders=("imagenet", "imagenet-1k", "ILSVRC2012", "tiny-imagenet-20"),
    files=("train/*/*", "train.tar"),
    source="ILSVRC 2012 (image-net.org), as folders or tars of train and val images",
    size="1,281,167 and 50,000 images of 1,000 classes",
)

CRITEO = DatasetLocation(
    "Criteo's click log",
    folders=("criteo", "dac"),
    files=(*CRITEO_FILES, "day_[0-9]*"),
    source="Criteo's Kaggle challenge (train.txt) or its terabyte log (day_0 to day_23)",
    size="45,840,617 rows, or 4,373,472,329",
    otherwise="a generated click log",
)

SQUAD = DatasetLocation(
    "SQuAD 1.1",
    folders=("squad-v1.1", "squad"),
    files=(SQUAD_DEV, f"{SQUAD_DEV}.gz"),
    other_files=(f"{SQUAD_TRAIN} or {SQUAD_TRAIN}.gz",),
    source="rajpurkar.github.io/SQuAD-explorer",
    size="87,599 and 10,570 questions",
)

PLAIN_TEXT = DatasetLocation(
    "plain text",
    folders=("wikitext-2", "wikitext-103", "text"),
    files=("*.txt", "*.txt.gz", "wiki.train.tokens"),
    source="any corpus, blank lines between documents; or of WikiText, with its valid file",
    size="any amount",
    otherwise="the documentation of Python's standard library",
)
