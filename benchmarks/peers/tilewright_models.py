"""Tilewright's side of the comparisons: the same nets, weights, inputs and steps as the peers'."""

from __future__ import annotations

import tilewright as tw
from benchmarks._state import batch, seeded_state
from tilewright import models, nn, optim

MODELS = {
    "resnet18": lambda: models.resnet18(num_classes=1000),
    "mobilenet_v2": lambda: models.mobilenet_v2(num_classes=1000),
    "nature_cnn": lambda: models.nature_cnn(num_classes=6),
}


def _model(name: str, device: str):
    model = MODELS[name]()
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict({key: tw.tensor(value) for key, value in seeded_state(shapes).items()})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the two sides' first losses are compared, so neither may draw at random
    return model.to(device=device)


def training_step(model: str, batch_size: int, threads: int, device: str = "cpu"):
    """A callable doing forward, cross-entropy, backward and SGD with momentum; it returns the loss."""
    net = _model(model, device).train()
    images, labels = batch(model, batch_size)
    x = tw.tensor(images, device=device).to(layout="channels_last")
    y = tw.tensor(labels, device=device)
    optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = tw.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, lambda loss: [float(loss.item())]


def inference(model: str, batch_size: int, threads: int, device: str = "cpu"):
    """A callable doing one forward pass in evaluation mode; it returns the logits."""
    net = _model(model, device).eval()
    x = tw.tensor(batch(model, batch_size)[0], device=device).to(layout="channels_last")

    def forward():
        with tw.no_grad():
            return net(x)

    return forward, lambda logits: logits.numpy()[0].tolist()


def versions() -> dict[str, str]:
    return {"tilewright": tw.__version__}
