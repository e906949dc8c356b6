"""Scripts of others: run by `make test-outside`, in an environment that has what they import."""

import pytest

collect_ignore = ["scripts"]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",  # models and data are made here
    "HF_DATASETS_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """What a script would download it does not; its caches are the test's own."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
