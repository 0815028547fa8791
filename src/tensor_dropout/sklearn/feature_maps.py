"""Images to feature maps of a network, as a transformer of scikit-learn."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.extract import Reader, extract, extract_into, first_sample, hash_network, resting
from tensor_dropout.features.inputs import Preparation, Source, open_source
from tensor_dropout.features.layers import plain_network
from tensor_dropout.features.probe import Probe, Wish, fixed_input, probe
from tensor_dropout.features.store import Store
from tensor_dropout.progress import show_progress
from tensor_dropout.sklearn.base import quarter_of_memory
from tensor_dropout.sklearn.defaults import check_number

PRECISIONS = {None: None, "float32": None, "bfloat16": torch.bfloat16}
DTYPES = ("float32", "float16", "float64")
CACHE_VERSION = 3
"""Counts up when the same settings give other rows."""


class FeatureMaps(TransformerMixin, BaseEstimator):
    """Runs images through a frozen network once and returns the feature maps of a layer, (n, C, H, W[, D]).

    The network is run in ``eval`` mode, only as far as the layer, and left as it was. ``fit`` learns nothing; it checks
    the settings and finds the layer. Copies of this object (``clone``, ``GridSearchCV``) share the network.

    Args:
        model: any ``nn.Module``: torchvision, timm, MONAI, Hugging Face, your own. In DDP or ``torch.compile``: what is
            inside.
        layer: the name of a module (``model.named_modules()``) or a list of names, whose maps are joined along the
            channels at the smallest grid. None takes the last map of stride 16, else of the largest stride below,
            else of the smallest above, and warns which. Of a module that runs several times the last output counts.
        size: what images are resized to (bilinear, with antialias): one number or (height, width). Volumes keep their
            size unless it has three numbers.
        batch: how many samples go through the network at once.
        device: where to run; None is where the network is.
        cache: a folder that keeps the maps, so that a second start, or a start after a kill, computes only what is
            missing. None keeps nothing. The key is the network (weights, structure, what it gives for fixed numbers),
            the settings, and the content of each file.
        mean: of the channels of images in [0, 1]: "imagenet", one or three numbers, or None for 0. "imagenet" for
            volumes means each volume's own mean.
        std: likewise; None for 1.
        pool: a smaller grid to average to: one size, or one per axis.
        grid: the grid of tokens (n, T, C), where it cannot be told from an earlier map.
        channel_axis: where a map's channels are: 1, or -1 for networks that keep them last (Swin).
        precision: "bfloat16" runs the network under autocast; None or "float32" as it is.
        dtype: of the maps: "float32", "float16" (half the memory) or "float64".
        verbose: whether a progress bar is shown on a terminal.

    Attributes:
        layer_: the name of the layer, or the list of names.
        map_shape_: (C, H, W[, D]).
        places_: the layers, and how their tokens lie.
        sketch_: 17 numbers that tell what the network gives for fixed inputs, nearly the same on another machine.
        seconds_: what ``transform`` spent waiting for samples, in the network, and reading or writing the cache.
        computed_: how many samples ``transform`` ran through the network; the others were in the cache.

    Raises:
        TensorDropoutError: for settings and inputs that cannot be used; every file that cannot be read is named.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=4))
        >>> FeatureMaps(network, "2").fit_transform(torch.zeros(5, 3, 64, 64)).shape
        (5, 16, 4, 4)
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str | Sequence[str] | None = None,
        *,
        size: int | tuple[int, ...] = 224,
        batch: int = 32,
        device: Any = None,
        cache: str | os.PathLike[str] | None = None,
        mean: Any = "imagenet",
        std: Any = "imagenet",
        pool: int | tuple[int, ...] | None = None,
        grid: tuple[int, ...] | None = None,
        channel_axis: int = 1,
        precision: str | None = None,
        dtype: str = "float32",
        verbose: bool = True,
    ) -> None:
        self.model = model
        self.layer = layer
        self.size = size
        self.batch = batch
        self.device = device
        self.cache = cache
        self.mean = mean
        self.std = std
        self.pool = pool
        self.grid = grid
        self.channel_axis = channel_axis
        self.precision = precision
        self.dtype = dtype
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> FeatureMaps:
        """Check the settings and find the layer, with one forward pass on fixed numbers of the shape of X's samples.

        Args:
            X: see :meth:`transform`.
            y: not used.
        """
        network, source = self._open(X)
        with resting(network, self.device, "FeatureMaps"):
            self._find(network, source)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The maps of X, (n, C, H, W[, D]).

        With a cache, maps of more than 256 MiB come as a read-only memory map (in another order than the cache's:
        only if they are more than a quarter of memory).

        Args:
            X: paths of images (turned upright as their EXIF data say), or of NIfTI volumes; or inputs as the network
                takes them, which are neither resized nor standardized: an array or tensor (n, C, H, W[, D]), a list of
                such samples, or a ``Dataset`` whose items are tensors or tuples that begin with one.
        """
        network, source = self._open(X)
        with resting(network, self.device, "FeatureMaps"):
            found = self._find(network, source)
            store = self._store(network, source, found)
            autocast, dtype = PRECISIONS[self.precision], np.dtype(self.dtype)
            reader = Reader(network, found, self.input_shape_, self.batch, autocast, dtype, "FeatureMaps")
            with show_progress("feature maps", len(source), shown=bool(self.verbose)) as advance:
                if store is None:
                    maps = extract(reader, source, advance)
                else:
                    maps = extract_into(store, reader, source, advance, quarter_of_memory())
        self.seconds_, self.computed_ = reader.seconds, reader.computed
        return maps

    # Steps.

    def _open(self, X: Any) -> tuple[nn.Module, Source]:
        check_number("FeatureMaps", "batch", self.batch, 1, float("inf"), kind="int")
        if self.precision not in PRECISIONS:
            raise TensorDropoutError(f"FeatureMaps: precision is None, 'float32' or 'bfloat16', got {self.precision!r}")
        if self.dtype not in DTYPES:
            raise TensorDropoutError(f"FeatureMaps: dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.cache, str | os.PathLike | None):
            raise TensorDropoutError(f"FeatureMaps: cache is a folder, or None, got {self.cache!r}")
        preparation = Preparation(self.size, self.mean, self.std).checked("FeatureMaps")
        return plain_network(self.model, "FeatureMaps"), open_source(X, preparation, "FeatureMaps")

    def _find(self, network: nn.Module, source: Source) -> Probe:
        """Find the layers; sets the attributes."""
        sample = first_sample(source, "FeatureMaps")
        wish = Wish(self.layer, self.pool, self.grid, self.channel_axis)
        found = probe(network, fixed_input(network, sample.shape), wish, "FeatureMaps")
        names = [place.name for place in found.places]
        layer = names[0] if self.layer is None or isinstance(self.layer, str) else names
        if self.layer is None and getattr(self, "layer_", None) != layer:
            shape = "×".join(map(str, found.map_shape))
            warnings.warn(f"FeatureMaps: picked layer={layer!r}, maps {shape}; name it to choose", stacklevel=3)
        self.layer_, self.places_, self.pool_ = layer, found.places, found.pool
        self.map_shape_, self.input_shape_, self.sketch_ = found.map_shape, tuple(sample.shape), found.sketch
        return found

    def _store(self, network: nn.Module, source: Source, found: Probe) -> Store | None:
        """The cache of these settings; None without one."""
        if self.cache is None:
            return None
        about = {
            "version": CACHE_VERSION,
            "network": hash_network(network),
            "outputs": found.fingerprint,
            "places": [place.as_json() for place in found.places],
            "pool": found.pool,
            "input_shape": list(self.input_shape_),
            "preparation": source.description,
            "precision": self.precision,
            "dtype": self.dtype,
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
        return Store(Path(self.cache).expanduser() / key, found.map_shape, self.dtype, about)

    # What scikit-learn asks.

    def __sklearn_clone__(self) -> FeatureMaps:
        """The same settings with the same network: it is not copied."""
        return type(self)(**self.get_params(deep=False))

    def __sklearn_is_fitted__(self) -> bool:
        return True  # nothing is learned

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.no_validation = True
        tags.input_tags.three_d_array = True
        return tags
