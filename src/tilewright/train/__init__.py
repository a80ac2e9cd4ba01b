"""Training: the loop, its callbacks, checkpoints and metrics."""

from tilewright.train.callbacks import Callback, EarlyStopping, JsonlLog, TensorBoard
from tilewright.train.checkpoint import load_checkpoint, save_checkpoint
from tilewright.train.metrics import Mean, accuracy
from tilewright.train.trainer import Interrupted, Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "Interrupted",
    "JsonlLog",
    "Mean",
    "TensorBoard",
    "Trainer",
    "accuracy",
    "load_checkpoint",
    "save_checkpoint",
]
