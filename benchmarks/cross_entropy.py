"""Which closed form is closest to the expected cross-entropy? Small networks on digits, 597 held-out images.

    python benchmarks/cross_entropy.py

Prints the mean absolute error per image of each candidate against 4,000 draws of the masks.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import tensor_dropout as td

DRAWS = 4000


def load():
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    return x[:1200], y[:1200], x[1200:], y[1200:]


def make_head(format, theta):
    dropout = td.TensorDropout(theta, per_sample=True)
    if format == "cp":
        return td.CPRegression((32, 4, 4), 10, 32, dropout=dropout)
    return td.TuckerRegression((32, 4, 4), 10, (16, 3, 3, 8), dropout=dropout)


def train(format, theta, epochs, x, y):
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2)]
    net = nn.Sequential(*first, nn.BatchNorm2d(32), nn.ReLU(), make_head(format, theta))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net.eval()


def sample(head, features, y):
    losses = [
        F.cross_entropy(head.regress(features, head.draw_masks(len(y))), y, reduction="none") for _ in range(DRAWS)
    ]
    return torch.stack(losses).mean(0)


def candidates(head, features, y):
    mean, covariance = head.moments(features, covariance=True)
    variance = covariance.diagonal(dim1=1, dim2=2)
    own = mean.gather(1, y[:, None]).squeeze(1)
    p, plain = mean.softmax(-1), mean.logsumexp(-1) - own
    nodes = torch.quasirandom.SobolEngine(10, scramble=True, seed=0).draw(256).clamp(1e-6, 1 - 1e-6)
    normal = torch.erfinv(2 * nodes - 1) * 2**0.5
    values, vectors = torch.linalg.eigh(covariance.double())
    root = (vectors * values.clamp(min=0).sqrt()[:, None]).float()
    correlated = mean + torch.einsum("bij,nj->nbi", root, normal)
    independent = mean + variance.sqrt() * normal[:, None]
    return {
        "mean network": plain,
        "mean-field": F.cross_entropy(mean / (1 + math.pi / 8 * variance).sqrt(), y, reduction="none"),
        "log-normal bound": (mean + variance / 2).logsumexp(-1) - own,
        "2nd order, diagonal": plain + 0.5 * (p * (1 - p) * variance).sum(-1),
        "2nd order, exact covariance": plain
        + 0.5 * ((p * variance).sum(-1) - torch.einsum("bo,bop,bp->b", p, covariance, p)),
        "Gaussian, independent (256 nodes)": independent.logsumexp(-1).mean(0) - own,
        "Gaussian, correlated (256 nodes)": correlated.logsumexp(-1).mean(0) - own,
    }


def main():
    x, y, x_test, y_test = load()
    rows = []
    for format in ("cp", "tucker"):
        for theta in (0.9, 0.7, 0.5):
            for epochs in (1, 15):
                net = train(format, theta, epochs, x, y)
                with torch.no_grad():
                    features = net[:-1](x_test)
                    truth = sample(net[-1], features, y_test)
                    found = candidates(net[-1], features, y_test)
                    std = net[-1].moments(features).variance.sqrt().mean().item()
                errors = {name: (value - truth).abs().mean().item() for name, value in found.items()}
                rows.append((f"{format} θ={theta} {epochs} ep.", std, truth.mean().item(), errors))
    names = list(rows[0][3])
    print("| head | logit std | E[CE] | " + " | ".join(names) + " |")
    print("|---" * (3 + len(names)) + "|")
    for name, std, truth, errors in rows:
        print(f"| {name} | {std:.2f} | {truth:.3f} | " + " | ".join(f"{errors[n]:.3f}" for n in names) + " |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
