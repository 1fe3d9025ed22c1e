"""A Mamba language model over CuPy and NumPy arrays: load, generate, train, save, with no framework::

    config, parameters = mamba.load(folder, xp=cupy)            a checkpoint of Hugging Face's
    model = mamba.Model(config, parameters)
    logits = model(tokens)                                      (batch, length, vocab)
    more = model.generate(tokens, 100)                          (batch, 100)
    loss, gradients = mamba.loss_and_gradients(model, tokens)

On CuPy arrays it needs cuBLAS: the extra cublas12 or cublas13 beside cuda12 or cuda13.
"""

from ._products import has_cublas
from .checkpoint import load, save
from .config import Config, initial_parameters
from .gradients import loss_and_gradients
from .model import CapturedStep, Model, State
from .training import AdamW

__all__ = [
    "AdamW", "CapturedStep", "Config", "Model", "State", "has_cublas", "initial_parameters", "load",
    "loss_and_gradients", "save",
]  # fmt: skip
