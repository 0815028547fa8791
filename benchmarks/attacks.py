"""How long attacks take, beside Foolbox, in one interleaved run.

    python benchmarks/attacks.py digits                 CPU: a small network trained on real digits, against Foolbox
    python benchmarks/attacks.py cifar [--root FOLDER]  PGD-50 over 10,000 images, ResNet-18, float32 (TF32 on a GPU)

``digits``: first the same attack, from the same start, to its end (nobody leaves); then PGD with five restarts on the
undefended network, where fooled examples leave the batch. Median of repeats, and the ratio within each repeat.
``cifar``: nobody leaves early. Without --root images and weights are random (simulated: only the time means something).
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tensor_dropout.robustness import Target, pgd
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.nets import build_net
from tensor_dropout_lab.run_records import describe_environment

EPSILON = 0.2


def train_digits():
    """A small convolutional network, trained in seconds."""
    torch.manual_seed(0)
    data = load_data("digits")
    x, y = data.train.inputs.float() / 16, data.train.targets
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(64):
            loss = F.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval(), data.test.inputs.float() / 16, data.test.targets


def time_once(work):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def run_digits(repeats):
    import foolbox

    net, x, y = train_digits()
    target = Target(net, batch=512)
    theirs = foolbox.PyTorchModel(net, bounds=(0, 1))
    steps, rows = 50, {}
    plain = foolbox.attacks.LinfPGD(steps=steps, rel_stepsize=2.5 / steps)
    cases = {
        "PGD-50, to the end": (
            lambda: pgd(EPSILON, steps=steps, keep="last")(target, x, y),
            lambda: plain(theirs, x, y, epsilons=EPSILON)[1],
        ),
        "PGD-50, 5 restarts": (
            lambda: pgd(EPSILON, steps=steps, restarts=5)(target, x, y),
            lambda: plain.repeat(5)(theirs, x, y, epsilons=EPSILON)[1],
        ),
    }
    for name, (ours, other) in cases.items():
        times, accuracy = {"ours": [], "foolbox": []}, {}
        for warm_up in (ours, other):
            warm_up()
        for _ in range(repeats):
            for kind, work in (("ours", ours), ("foolbox", other)):
                seconds, worst = time_once(work)
                times[kind].append(seconds)
                accuracy[kind] = 100 * float((target.predict(worst).output.argmax(1) == y).double().mean())
        ratios = [b / a for a, b in zip(times["ours"], times["foolbox"], strict=True)]
        rows[name] = {
            "seconds": {kind: statistics.median(values) for kind, values in times.items()},
            "times_as_fast": statistics.median(ratios),
            "smallest_and_largest_ratio": [min(ratios), max(ratios)],
            "accuracy_left": accuracy,
        }
    return rows


def run_cifar(root, weights, images, batches, repeats):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    if root is None:
        x, y = torch.rand(images, 3, 32, 32), torch.randint(100, (images,))
        prepare = None
    else:
        data = load_data("cifar100", root=root)
        x, y = data.test.inputs[:images].float() / 255, data.test.targets[:images]
        prepare = lambda z: data.prepare(255 * z)  # noqa: E731
    if weights is None:
        net = build_net("resnet18", outputs=100, input_shape=(3, 32, 32))
    else:
        import tensor_dropout as td

        net = td.load(weights)
    net = net.to(device).eval().to(memory_format=torch.channels_last)
    x, y = x.to(device).contiguous(memory_format=torch.channels_last), y.to(device)
    rows = {}
    for batch in batches:
        target = Target(net, prepare=prepare, batch=batch)
        attack = pgd(8 / 255, steps=50, keep="last")
        pgd(8 / 255, steps=2, keep="last")(target, x, y)  # warm-up
        times = [time_once(lambda: attack(target, x, y))[0] for _ in range(repeats)]  # noqa: B023
        rows[f"batch {batch}"] = {"seconds": statistics.median(times), "all": times}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("digits", "cifar"))
    parser.add_argument("--root", type=Path, help="the folder with cifar-100-python")
    parser.add_argument("--weights", type=Path, help="a trained ResNet-18: model.safetensors of a run")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    if given.case == "digits":
        rows = run_digits(given.repeats)
    else:
        rows = run_cifar(given.root, given.weights, given.images, given.batch, given.repeats)
    record = {"case": given.case, "rows": rows, "environment": describe_environment()}
    print(json.dumps(record, indent=2))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
