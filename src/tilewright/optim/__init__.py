"""Optimizers, learning-rate schedules, gradient clipping and averages of weights."""

from tilewright.optim.adam import Adam, AdamW
from tilewright.optim.clip import clip_grad_norm_, clip_grad_value_
from tilewright.optim.ema import EMA
from tilewright.optim.optimizer import Optimizer
from tilewright.optim.rmsprop import RMSprop
from tilewright.optim.schedules import CosineAnnealing, LinearWarmup, MultiStep, OneCycle, Schedule, Step
from tilewright.optim.sgd import SGD

__all__ = [
    "EMA", "SGD", "Adam", "AdamW", "CosineAnnealing", "LinearWarmup", "MultiStep", "OneCycle", "Optimizer", "RMSprop", "Schedule", "Step",
    "clip_grad_norm_", "clip_grad_value_",
]  # fmt: skip
