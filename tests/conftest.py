"""One thread and no progress bars, for the tests and the processes they start; set before PyTorch is loaded."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
