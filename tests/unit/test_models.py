"""Networks: sizes and names as published, folded evaluation as the layers apart, and that they learn."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import tilewright as tw
from tilewright import io, models, nn

SIZES = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "mobilenet_v1": 4_231_976,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "mobilenet_v3_small": 2_542_856,
}


def bn(name):
    return [f"{name}.{p}" for p in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def conv_bn(name):
    return [f"{name}.0.weight", *bn(f"{name}.1")]


def both(name):
    return [f"{name}.weight", f"{name}.bias"]


def resnet(counts, convs, first_shortcut):
    names = ["conv1.weight", *bn("bn1"), *both("fc")]
    for layer, count in enumerate(counts, 1):
        for block in range(count):
            at = f"layer{layer}.{block}"
            for i in range(1, convs + 1):
                names += [f"{at}.conv{i}.weight", *bn(f"{at}.bn{i}")]
            if block == 0 and (layer > 1 or first_shortcut):
                names += conv_bn(f"{at}.downsample")
    return names


def mobilenet_v2():
    names = [*conv_bn("features.0"), *conv_bn("features.1.conv.0"), "features.1.conv.1.weight", *bn("features.1.conv.2")]
    for i in range(2, 18):
        at = f"features.{i}.conv"
        names += [*conv_bn(f"{at}.0"), *conv_bn(f"{at}.1"), f"{at}.2.weight", *bn(f"{at}.3")]
    return [*names, *conv_bn("features.18"), *both("classifier.1")]


def mobilenet_v3(blocks, plain, squeezed):
    """plain: blocks without an expansion; squeezed: blocks with squeeze-and-excitation."""
    names = conv_bn("features.0")
    for i in range(1, blocks + 1):
        at = f"features.{i}.block"
        parts = ([] if i in plain else ["expand"]) + ["depthwise"] + (["squeeze"] if i in squeezed else []) + ["project"]
        for j, part in enumerate(parts):
            names += [*both(f"{at}.{j}.fc1"), *both(f"{at}.{j}.fc2")] if part == "squeeze" else conv_bn(f"{at}.{j}")
    return [*names, *conv_bn(f"features.{blocks + 1}"), *both("classifier.0"), *both("classifier.3")]


NAMES = {
    "resnet18": resnet((2, 2, 2, 2), 2, False),
    "resnet34": resnet((3, 4, 6, 3), 2, False),
    "resnet50": resnet((3, 4, 6, 3), 3, True),
    "mobilenet_v2": mobilenet_v2(),
    "mobilenet_v3_large": mobilenet_v3(15, {1}, {4, 5, 6, 11, 12, 13, 14, 15}),
    "mobilenet_v3_small": mobilenet_v3(11, {1}, {1, 4, 5, 6, 7, 8, 9, 10, 11}),
}
SHAPES = {
    "resnet18": {"conv1.weight": (64, 3, 7, 7), "layer2.0.downsample.0.weight": (128, 64, 1, 1), "fc.weight": (1000, 512)},
    "resnet34": {"layer4.2.conv2.weight": (512, 512, 3, 3)},
    "resnet50": {
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer3.0.conv2.weight": (256, 256, 3, 3),
        "layer4.0.conv1.weight": (512, 1024, 1, 1),
    },
    "mobilenet_v2": {"features.2.conv.1.0.weight": (96, 1, 3, 3), "features.17.conv.2.weight": (320, 960, 1, 1), "classifier.1.weight": (1000, 1280)},
    "mobilenet_v3_large": {
        "features.4.block.2.fc1.weight": (24, 72, 1, 1),
        "features.16.0.weight": (960, 160, 1, 1),
        "classifier.3.weight": (1000, 1280),
    },
    "mobilenet_v3_small": {
        "features.1.block.1.fc1.weight": (8, 16, 1, 1),
        "features.12.0.weight": (576, 96, 1, 1),
        "classifier.0.weight": (1024, 576),
    },
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_published(name):
    assert sum(p.size for p in getattr(models, name)().parameters()) == SIZES[name]


@pytest.mark.parametrize("name", NAMES)
def test_weights_written_elsewhere_load_by_name(name, tmp_path):
    """A file with torchvision's names and shapes, in plain C order, without our checksum."""
    net = getattr(models, name)()
    state = net.state_dict()
    assert sorted(state) == sorted(NAMES[name])
    for key, shape in SHAPES[name].items():
        assert state[key].shape == shape
    rng = np.random.default_rng(0)
    arrays = {k: rng.standard_normal(v.shape).astype(v.dtype.np) for k, v in state.items()}
    save_file(arrays, tmp_path / "w.safetensors", {"format": "pt"})
    io.load_weights(tmp_path / "w.safetensors", net)
    assert all(np.array_equal(v.numpy(), arrays[k]) for k, v in net.state_dict().items())


# multiply-adds at 224 x 224, in millions, as the papers and torchvision's pages give them
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet18", 1814), ("resnet34", 3664), ("resnet50", 4089), ("mobilenet_v1", 569), ("mobilenet_v2", 300), ("mobilenet_v3_large", 217),
        ("mobilenet_v3_small", 57),
    ],
)  # fmt: skip
def test_cost_is_as_published(name, millions):
    report = nn.summary(getattr(models, name)(), (1, 3, 224, 224))
    layers = sum(r.flops for r in report.rows if r.kind in ("Conv2d", "Linear"))
    assert layers / 2e6 == pytest.approx(millions, rel=0.025)


SMALL = {
    "lenet": (lambda: models.lenet(), (2, 1, 28, 28), 10),
    "resnet18": (lambda: models.resnet18(7), (2, 3, 64, 64), 7),
    "resnet50": (lambda: models.resnet50(7, in_channels=1), (2, 1, 64, 64), 7),
    "mobilenet_v1": (lambda: models.mobilenet_v1(7, width=0.25), (2, 3, 64, 64), 7),
    "mobilenet_v2": (lambda: models.mobilenet_v2(7, width=0.5), (2, 3, 64, 64), 7),
    "mobilenet_v3_large": (lambda: models.mobilenet_v3_large(7), (2, 3, 64, 64), 7),
    "mobilenet_v3_small": (lambda: models.mobilenet_v3_small(7), (2, 3, 64, 64), 7),
    "mobilenet_small": (lambda: models.mobilenet_small(), (2, 1, 28, 28), 10),
    "nature_cnn": (lambda: models.nature_cnn(), (2, 4, 84, 84), 6),
}


@pytest.mark.parametrize("name", SMALL)
def test_evaluation_folded_is_as_layers_apart(name):
    """With gradients on, the layers run apart; with gradients off, folded and fused."""
    make, shape, classes = SMALL[name]
    net, rng = make(), np.random.default_rng(0)
    x = tw.tensor(rng.standard_normal(shape), "float32")
    net(x)  # running statistics of some use
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_var.copy_(m.running_var.numpy() * rng.uniform(0.7, 1.4, m.num_features))
            m.bias.copy_(0.3 * rng.standard_normal(m.num_features))
    net.eval()
    apart = net(x)
    assert apart.requires_grad
    with tw.no_grad():
        folded = net(x)
        again = net(x)
    assert folded.shape == (shape[0], classes)
    scale = np.abs(apart.numpy()).max()
    np.testing.assert_allclose(folded.numpy(), apart.numpy(), atol=2e-4 * scale)
    np.testing.assert_array_equal(again.numpy(), folded.numpy())


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name):
    make, shape, classes = SMALL[name]
    net = make()
    x = tw.tensor(np.random.default_rng(0).standard_normal(shape), "float32")
    tw.cross_entropy(net(x), tw.tensor([0, classes - 1])).backward()
    without = [n for n, p in net.named_parameters() if p.grad is None or not np.isfinite(p.grad.numpy()).all()]
    assert not without
    zero = [n for n, p in net.named_parameters() if not np.abs(p.grad.numpy()).max() > 0]
    assert not zero


@pytest.mark.parametrize("name", ["lenet", "mobilenet_small", "nature_cnn"])
def test_a_network_learns_a_few_images_by_heart(name):
    tw.manual_seed(0)
    make, shape, classes = SMALL[name]
    net, rng = make(), np.random.default_rng(0)
    x = tw.tensor(rng.standard_normal((8, *shape[1:])), "float32")
    y = tw.tensor(rng.integers(0, classes, 8))
    optimizer = tw.optim.AdamW(net.parameters(), lr=2e-3)
    for _ in range(40):
        loss = tw.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    net.eval()
    with tw.no_grad():
        np.testing.assert_array_equal(net(x).numpy().argmax(1), y.numpy())


def test_residuals_and_hooks_see_the_same_values():
    net = models.resnet18(5).eval()
    x = tw.tensor(np.random.default_rng(0).standard_normal((1, 3, 64, 64)), "float32")
    with tw.no_grad():
        plain = net(x).numpy()
        shapes = {}
        for name, module in net.named_modules():
            module.register_forward_hook(lambda m, args, out, name=name: shapes.update({name: out.shape}))
        hooked = net(x).numpy()
    np.testing.assert_allclose(hooked, plain, atol=2e-4 * np.abs(plain).max())
    assert shapes["layer4.1.bn2"] == (1, 512, 2, 2)
    assert shapes["layer2.0.downsample"] == (1, 128, 8, 8)


def test_a_hook_on_a_fused_activation_still_fires():
    block = models.mobilenet_v2().features[0].eval()
    seen = []
    block[2].register_forward_hook(lambda module, args, out: seen.append(out))
    x = tw.tensor(np.random.default_rng(0).standard_normal((1, 3, 16, 16)), "float32")
    with tw.no_grad():
        assert block(x) is seen[0]
