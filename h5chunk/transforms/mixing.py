"""Mix the samples of a batch, and their labels: `MixUp`, `CutMix`, and a random choice of these.

They come last in the list of a field, because they need whole batches. `Mixer` applies them to the batches of a loader
or a data set, after all other transforms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.errors import OptionError, check_whole, names_text
from h5chunk.native import cuda
from h5chunk.plan.draws import Draws
from h5chunk.store.read.fields import Field
from h5chunk.transforms.compiled import KERNELS, Compiling, current_stream
from h5chunk.transforms.csr import Allocate, fresh
from h5chunk.transforms.images import channel_axis
from h5chunk.transforms.kernel_cache import bits_of, path_of, prepared

STREAM = 1 << 29  # of the draws that mix a batch
MAX_CLASSES = 1 << 24
BLOCK, WARPS = 1024, 4  # elements of a sample that a program of the kernel mixes, and its warps
Random = np.random.RandomState  # whose numbers are the same in all versions of NumPy


class Blend(NamedTuple):
    """How the samples of a batch are mixed: each with the one before it, and the first with the last.

    ``share`` is the weight of a sample's own label. Its values have the same weight, unless there is a ``box``: top,
    left, height and width of the pixels that are replaced with those of the other sample.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


NOTHING = Blend(1.0, (0, 0, 0, 0))  # for a batch of one sample, or none


@dataclass(frozen=True)
class Mixing:
    """Base class of `MixUp` and `CutMix`, which mix each sample with the one before it in the batch."""

    _: KW_ONLY
    alpha: float = 1.0
    num_classes: int | None = None
    labels: str | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        is_number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        if not (is_number and 0 < self.alpha < math.inf):
            raise OptionError(f"{name}: alpha is {self.alpha!r}: pass a positive number, such as 1.0")
        if self.num_classes is not None:
            number = check_whole(f"{name}: num_classes", self.num_classes, 1, MAX_CLASSES)
            object.__setattr__(self, "num_classes", number)
        if self.labels is not None and not isinstance(self.labels, str):
            raise OptionError(f"{name}: labels is {self.labels!r}: pass the name of the field of labels")

    def blend(self, random: Random, batch: torch.Tensor, axis: int) -> Blend:
        """Draw how to mix a batch. ``axis`` is the axis of channels in its samples."""
        raise NotImplementedError

    def __call__(self, batch: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a batch and its labels, with random numbers from torch's generator."""
        return _call(self, batch, labels)


@dataclass(frozen=True)
class MixUp(Mixing):
    """Replace each sample with a weighted mean of it and another one of its batch, and their labels likewise.

    It is equal to torchvision's transform of this name: the weight of the sample itself is drawn for each batch, from
    the distribution Beta(alpha, alpha), and the other sample is the one before it in the batch (for the first sample,
    the last one). Put it last in the list of the images. Their labels, (n,) integers, become (n, num_classes) float32,
    as `torch.nn.functional.cross_entropy` takes them::

        transforms = [RandomResizedCrop(224), Normalize(mean, std), MixUp(alpha=0.2, num_classes=1000)]
        for images, labels in ChunkLoader("photos.h5", 256, transforms=transforms):
            loss = cross_entropy(network(images), labels)

    The random numbers depend on the seed, the epoch, and the first sample of the batch, so that equal batches are mixed
    equally with any number of workers and ranks, and after resuming. A batch of one sample is mixed with itself. For a
    DataLoader, pass it to a `h5chunk.ChunkDataset`, which is read in batches, also in torch's ``Subset``. In torch's
    ``ConcatDataset``, which reads single samples, it raises OptionError. As a function of a batch,
    ``MixUp(num_classes=1000)(images, labels)``, it draws from torch's generator.

    Parameters
    ----------
    alpha : float
        Parameter of the Beta distribution. At 1, all weights are equally likely; near 0, most are close to 0 or 1.
    num_classes : int, optional
        Number of classes. Required unless labels are (n, num_classes): one number for each class.
    labels : str, optional
        Name of the field of labels. Default: the second field of the data set.

    Raises
    ------
    OptionError
        An argument is invalid; or, when batches are made, samples are not floats (put `Normalize` or `ToDtype` first),
        or labels are neither integers from 0 to ``num_classes`` - 1 nor numbers for each class. On a GPU, labels that
        are out of range become NaN, and the next batch raises the error.
    """

    def blend(self, random: Random, batch: torch.Tensor, axis: int) -> Blend:
        if not batch.is_floating_point():
            raise OptionError(
                f"MixUp computes means, but the samples are {batch.dtype}: put Normalize(mean, std) or "
                "ToDtype(torch.float32, scale=True) before it"
            )
        return Blend(float(random.beta(self.alpha, self.alpha)))


@dataclass(frozen=True)
class CutMix(Mixing):
    """Replace a box of each image with that of another one in its batch, and mix their labels by its area.

    It is equal to torchvision's transform of this name: one box is drawn for each batch, whose area has the
    distribution Beta(alpha, alpha), as a fraction of the image, before it is cut at the edges. The other image is the
    one before it in the batch (for the first image, the last one). Values may have any dtype. `MixUp` describes the
    labels and the parameters, and where to put it.

    Parameters
    ----------
    alpha, num_classes, labels
        As for `MixUp`.

    Raises
    ------
    OptionError
        As for `MixUp`; or samples have no height and width.
    """

    def blend(self, random: Random, batch: torch.Tensor, axis: int) -> Blend:
        height, width = _sides(batch, axis)
        half = 0.5 * math.sqrt(1 - float(random.beta(self.alpha, self.alpha)))
        ends = []
        for side in (width, height):
            centre, reach = int(random.randint(side)), int(half * side)
            ends.append((max(0, centre - reach), min(side, centre + reach)))
        (left, right), (top, bottom) = ends
        box = top, left, bottom - top, right - left
        return Blend(1 - box[2] * box[3] / (height * width), box)


@dataclass(frozen=True)
class RandomChoice:
    """Apply one of several `MixUp` and `CutMix`, chosen at random for each batch, like torchvision's transform.

    ::

        RandomChoice([CutMix(num_classes=1000), MixUp(alpha=0.2, num_classes=1000)])

    Parameters
    ----------
    transforms : sequence of MixUp and CutMix
        With the same ``num_classes`` and ``labels``.
    p : sequence of float, optional
        Probability of each; they are divided by their sum. Default: all are equally likely.
    """

    transforms: Sequence[Mixing]
    p: Sequence[float] | None = None

    def __post_init__(self) -> None:
        is_list = isinstance(self.transforms, Sequence) and len(self.transforms) > 0
        if not is_list or not all(isinstance(each, Mixing) for each in self.transforms):
            raise OptionError(f"RandomChoice: transforms is {self.transforms!r}: pass a list of MixUp and CutMix")
        if len({(each.num_classes, each.labels) for each in self.transforms}) > 1:
            raise OptionError("RandomChoice: num_classes or labels differ between its transforms: make them equal")
        p = [1.0] * len(self.transforms) if self.p is None else [float(each) for each in self.p]
        if len(p) != len(self.transforms) or not all(0 <= each < math.inf for each in p) or not sum(p):
            raise OptionError(
                f"RandomChoice: p is {self.p!r}: pass a number of at least 0 for each of the {len(self.transforms)} "
                "transforms, of which one is above 0"
            )
        object.__setattr__(self, "transforms", tuple(self.transforms))
        object.__setattr__(self, "p", tuple(each / sum(p) for each in p))

    @property
    def num_classes(self) -> int | None:
        return self.transforms[0].num_classes

    @property
    def labels(self) -> str | None:
        return self.transforms[0].labels

    def blend(self, random: Random, batch: torch.Tensor, axis: int) -> Blend:
        """Draw a transform, and how it mixes a batch."""
        ends, number = list(accumulate(self.p or ())), random.random_sample()
        chosen = sum(number >= end for end in ends[:-1])
        return self.transforms[chosen].blend(random, batch, axis)

    __call__ = Mixing.__call__


MIXING = (Mixing, RandomChoice)
AnyMixing = Mixing | RandomChoice


def split_mixing(
    by_field: Mapping[str, Sequence[Any]],
) -> tuple[dict[str, list[Any]], tuple[str, AnyMixing] | None]:
    """Return the transforms of each field without that which mixes batches; and this, with the name of its field.

    Raise OptionError if it is not the last one, or not the only one.
    """
    mixing: tuple[str, AnyMixing] | None = None
    for name, transforms in by_field.items():
        for number, transform in enumerate(transforms):
            if not isinstance(transform, MIXING):
                continue
            if mixing is not None:
                raise OptionError(
                    f"{transform} comes after {mixing[1]}, but a batch is mixed once: pass RandomChoice([...]) of them"
                )
            if number < len(transforms) - 1:
                raise OptionError(f"{transform} mixes finished batches: put it last, after {transforms[-1]}")
            mixing = name, transform
    kept = {name: [each for each in own if not isinstance(each, MIXING)] for name, own in by_field.items()}
    return kept, mixing


class Mixer:
    """Mixes the batches of a loader or data set, which are tuples of tensors.

    Parameters
    ----------
    mixing : (str, MixUp, CutMix or RandomChoice)
        The name of the field to mix, and how.
    fields : mapping
        The fields by name, in order.
    counts : sequence of int
        The number of tensors that a batch has for each field.
    allocate : callable
        Returns host memory for batches.

    Raises
    ------
    OptionError
        A field does not exist or cannot be mixed.
    """

    def __init__(
        self,
        mixing: tuple[str, AnyMixing],
        fields: Mapping[str, Any],
        counts: Sequence[int],
        allocate: Allocate = fresh,
    ) -> None:
        name, self.transform = mixing
        names = list(fields)
        self.names = name, _labels_of(self.transform, name, fields)
        self.places = tuple(sum(counts[: names.index(each)]) for each in self.names)
        field = fields[name]
        for each in self.names:
            if counts[names.index(each)] > 1:
                raise OptionError(f"{self.transform} cannot mix field {each!r}, of which a batch has two tensors")
        self._axis = channel_axis(field.sample_shape, field.axes) if isinstance(field, Field) else 0
        self._allocate = allocate
        self._kernel: MixKernel | None = None  # for batches on a GPU

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None}  # another process makes its own

    def release(self) -> None:
        """Wait for the thread that compiles the kernel."""
        if self._kernel is not None:
            self._kernel.wait()

    def __call__(self, tensors: Sequence[torch.Tensor], seeds: np.ndarray | None = None) -> tuple[torch.Tensor, ...]:
        """Mix a batch, with the random numbers of its ``seeds``. Without these, random numbers are torch's."""
        mixed = list(tensors)
        images, labels = (tensors[place] for place in self.places)
        num_classes = check_batch(self.transform, images, labels)
        random = _random_of_torch() if seeds is None else Random(seeds)
        blend = self.transform.blend(random, images, self._axis) if len(images) > 1 else NOTHING
        if self._kernel is None and MixKernel.suits(images, labels):
            self._kernel = MixKernel(num_classes, images, labels, self._axis)
        made = None if self._kernel is None else self._kernel(blend, images, labels)
        made = made or mix(blend, images, labels, num_classes, self._axis, self._allocate)
        for place, tensor in zip(self.places, made, strict=True):
            mixed[place] = tensor
        return tuple(mixed)


def seeds_of_batches(draws: Draws, sizes: Iterable[int]) -> Iterator[np.ndarray]:
    """Yield the seeds, (2,) uint32, for mixing consecutive batches of these sizes; they depend on the first sample."""
    first = 0
    for size in sizes:
        samples = draws.samples[first : first + 1]
        numbers = draws._replace(samples=samples).uniform(STREAM, 2) if len(samples) else np.zeros((2, 1))
        yield (numbers[:, 0] * 2.0**32).astype(np.uint32)
        first += size


def _labels_of(transform: AnyMixing, name: str, fields: Mapping[str, Any]) -> str:
    """Return the name of the field of labels. Raise OptionError if it holds no labels."""
    found = transform.labels
    if found is None:
        if len(fields) < 2:
            raise OptionError(f"{transform} mixes labels, too, but {name!r} is the only field: add their field")
        found = list(fields)[1]
    if found not in fields:
        raise OptionError(f"{transform}: labels is not one of the fields {names_text(map(repr, fields))}")
    if found == name and transform.labels is None and name != "labels":
        others = [each for each in fields if each != name]
        raise OptionError(
            f"{transform} takes the second field for the labels, but mixes this field, {name!r}: pass the name of the "
            f"field of labels, as in labels={'labels' if 'labels' in others else others[0]!r}"
        )
    if found == name:
        raise OptionError(f"{transform} is in the list of its labels, {name!r}: put it in that of the images")
    field = fields[found]
    shape, kind = getattr(field, "sample_shape", None), field.dtype.kind
    if shape is None or len(shape) > 1 or kind not in "iubf" or (not shape and kind == "f"):
        raise OptionError(
            f"{transform} mixes labels, which are one integer per sample, or one number per class, but "
            f"{found!r} has {field.dtype}{list(shape or ())}: pass labels=, the name of the field of labels"
        )
    if not shape and transform.num_classes is None:
        raise OptionError(f"{transform}: {found!r} has one integer per sample, so pass num_classes=")
    return found


def mix(
    blend: Blend, images: torch.Tensor, labels: torch.Tensor, num_classes: int, axis: int, allocate: Allocate = fresh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixed images and labels in new memory. ``axis`` is the axis of channels in the images' samples."""
    out = _empty_like(images, allocate)
    blend_with_torch(blend, images, out, axis)
    return out, blend_labels(blend, labels, num_classes)


class MixKernel(Compiling):
    """Mixes batches on a GPU, images and labels in one launch, once the kernel is compiled.

    It is compiled for samples like those of a first batch. Labels that are no class do not raise an error at once,
    because waiting for the GPU would take long: they become NaN, and the next batch raises OptionError.
    """

    def __init__(self, num_classes: int, images: torch.Tensor, labels: torch.Tensor, axis: int) -> None:
        height, width = _sides(images, axis) if images.ndim > 2 else (1, 1)
        memory, inner = _in_memory(images), 1  # elements of a pixel that are neighbours in memory
        if memory is not images or (images.ndim > 3 and axis == images.ndim - 2):
            inner = memory.shape[-1]
        self._num_classes, self._options = (
            num_classes,
            {
                "sample_size": images[0].numel(),
                "inner": inner,
                "columns": width,
                "lines": height,
                "num_classes": num_classes,
                "is_index": labels.ndim == 1,
                "block": BLOCK,
                "num_warps": WARPS,
                "enable_fp_fusion": False,
            },
        )
        self._like, self._device = self._signature(images, labels), images.device
        self._wrong = torch.zeros(1, dtype=torch.int64, pin_memory=self._device.type == "cuda")  # a wrong label, or 0
        self._launches: dict[bool, cuda.Launch | None] = {}  # with and without a box
        likes = [(each[:1].shape, each.dtype) for each in (memory, labels)]
        self._prepare_in_thread(partial(self._prepare, likes))

    @staticmethod
    def suits(images: Any, labels: Any) -> bool:
        """Return whether the kernel supports the device, dtypes and memory format of a batch."""
        are_tensors = isinstance(images, torch.Tensor) and isinstance(labels, torch.Tensor)
        if not are_tensors or images.layout != torch.strided or images.device.type != "cuda" or not len(images):
            return False
        is_held = _in_memory(images).is_contiguous() and images[0].numel() < 1 << 31
        return is_held and labels.is_contiguous() and torch.float64 not in (images.dtype, labels.dtype)

    def _signature(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
        is_planar = _in_memory(images) is images
        return images.shape[1:], images.dtype, is_planar, labels.shape[1:], labels.dtype, images.device

    def _prepare(self, likes: Sequence[tuple[Any, torch.dtype]]) -> None:
        with torch.cuda.device(self._device):
            images, labels = (torch.ones(shape, dtype=dtype, device=self._device) for shape, dtype in likes)
            if labels.ndim == 1:
                labels.zero_()
            for blend in (Blend(0.25), Blend(0.25, (0, 0, 1, 1))):
                cuts = blend.box is not None
                if not cuts and not images.is_floating_point():
                    continue
                given, others = (
                    (images, labels, torch.zeros_like(images), self._empty_labels(1, labels)) for _ in range(2)
                )
                self._launches[cuts] = prepared(
                    path_of(KERNELS, "mix_samples", self._arguments(blend, *given), self._options | {"cuts": cuts}),
                    len(self._arguments(blend, *given)),
                    (),
                    partial(self._by_triton, blend, *given),
                    partial(self._is_right, blend, given, others),
                )

    def _is_right(self, blend: Blend, given: Sequence[torch.Tensor], others: Any, launch: cuda.Launch) -> bool:
        ran = self._by_driver(launch, blend, *others)
        return ran and all(torch.equal(one, other) for one, other in zip(given[2:], others[2:], strict=True))

    def __call__(
        self, blend: Blend, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a mixed batch; None if the kernel is not compiled yet, or the batch is unlike the first one."""
        if not self.is_ready or not MixKernel.suits(images, labels) or self._signature(images, labels) != self._like:
            return None
        if label := int(self._wrong):
            self._wrong.zero_()
            raise OptionError(_wrong_label(label, self._num_classes))
        out, soft = torch.empty_like(images), self._empty_labels(len(images), labels)
        given = _in_memory(images), labels, _in_memory(out), soft
        launch = self._launches.get(blend.box is not None)
        if launch is None or not self._by_driver(launch, blend, *given):
            with torch.cuda.device(self._device):
                self._by_triton(blend, *given)
        return out, soft

    def _empty_labels(self, count: int, labels: torch.Tensor) -> torch.Tensor:
        dtype = labels.dtype if labels.is_floating_point() else torch.float32
        return torch.empty(count, self._num_classes, dtype=dtype, device=self._device)

    def _arguments(self, blend: Blend, *given: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments of a launch: the tensors, and the numbers of a blend. The images are contiguous."""
        return *given, self._wrong, len(given[0]), blend.share, 1 - blend.share, *(blend.box or (0, 0, 0, 0))

    def _blocks(self, count: int) -> int:
        return count * (-(-self._options["sample_size"] // BLOCK) + 1)

    def _by_driver(self, launch: cuda.Launch, blend: Blend, *given: torch.Tensor) -> bool:
        *tensors, count, share, rest, top, left, height, width = self._arguments(blend, *given)
        numbers = count, bits_of(share), bits_of(rest), top, left, height, width
        stream = current_stream(int(self._device.index))
        return launch(stream, self._blocks(count), (*(each.data_ptr() for each in tensors), *numbers))

    def _by_triton(self, blend: Blend, *given: torch.Tensor) -> Any:
        from h5chunk.transforms.kernels import mix_samples as kernel

        arguments = self._arguments(blend, *given)
        return kernel[(self._blocks(len(given[0])),)](*arguments, **self._options, cuts=blend.box is not None)


def _in_memory(images: torch.Tensor) -> torch.Tensor:
    """Return a batch with its axes in the order of memory: as it is, or (n, H, W, C) for ``channels_last``."""
    if images.ndim == 4 and not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last):
        return images.permute(0, 2, 3, 1)
    return images


def check_batch(transform: AnyMixing, images: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the number of classes. Raise OptionError if a batch, or its labels, cannot be mixed."""
    if not isinstance(images, torch.Tensor) or images.layout != torch.strided:
        raise OptionError(f"{transform} mixes dense tensors, but the batch is {_kind(images)}: pass Dense for a matrix")
    if not isinstance(labels, torch.Tensor) or labels.ndim not in (1, 2) or labels.is_complex():
        raise OptionError(
            f"{transform} mixes labels of shape (batch,) or (batch, num_classes), but these are {_kind(labels)}"
        )
    if len(images) != len(labels):
        raise OptionError(f"{transform}: there are {len(images)} samples, but {len(labels)} labels")
    if labels.ndim == 2:
        if transform.num_classes not in (None, labels.shape[1]):
            raise OptionError(
                f"{transform}: labels have {labels.shape[1]} numbers per sample: pass num_classes={labels.shape[1]} "
                "or, if one of them is the class, a transform of their field that returns it"
            )
        return labels.shape[1]
    if labels.is_floating_point():
        raise OptionError(
            f"{transform} mixes integer labels, but these are {labels.dtype}: convert them, or pass a number per class"
        )
    if transform.num_classes is None:
        raise OptionError(f"{transform}: labels have one integer per sample, so pass num_classes=")
    return transform.num_classes


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    layout = "" if value.layout == torch.strided else f"{value.layout} ".removeprefix("torch.")
    return f"{layout}{value.dtype}{list(value.shape)}"


def _sides(batch: torch.Tensor, axis: int) -> tuple[int, int]:
    """Return height and width of the samples of a batch. Raise OptionError if they are no images."""
    shape = tuple(batch.shape[1:])
    if len(shape) > 2 and axis == len(shape) - 1:
        shape = shape[:-1]
    if len(shape) < 2 or not all(shape):
        raise OptionError(f"CutMix is for images, but samples have the shape {tuple(batch.shape[1:])}: pass MixUp")
    return shape[-2], shape[-1]


def _empty_like(images: torch.Tensor, allocate: Allocate) -> torch.Tensor:
    """Allocate memory for a batch, in the same memory format."""
    if images.device.type != "cpu":
        return torch.empty_like(images)
    memory = _in_memory(images)
    out = allocate(tuple(memory.shape), images.dtype)
    return out if memory is images else out.permute(0, 3, 1, 2)


def blend_with_torch(blend: Blend, images: torch.Tensor, out: torch.Tensor, axis: int) -> None:
    """Write the mixed images to ``out``, on any device. Means are computed in float32, or in float64 for float64."""
    exact = torch.float64 if images.dtype == torch.float64 else torch.float32
    parts = [(slice(0, 1), images[-1:]), (slice(1, None), images[:-1])]
    if images.device.type == "cpu":  # one sample at a time, so that temporary results stay in the cache
        parts = [(slice(number, number + 1), images[number - 1][None]) for number in range(len(images))]
    for place, before in parts:
        own, result = images[place], out[place]
        if blend.box is None:
            result.copy_(own.to(exact).mul(blend.share).add_(before.to(exact).mul(1 - blend.share)))
            continue
        result.copy_(own)
        top, left, height, width = blend.box
        if height and width:
            box: tuple[Any, ...] = (..., slice(top, top + height), slice(left, left + width))
            if images.ndim > 3 and axis == images.ndim - 2:
                box = (*box, slice(None))
            result[box] = before[box]


def blend_labels(blend: Blend, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the mixed labels, (n, num_classes): float32, or the dtype of labels that are floats."""
    soft = _one_hot(labels, num_classes) if labels.ndim == 1 else labels
    exact = soft.to(torch.float64 if soft.dtype == torch.float64 else torch.float32)
    mixed = exact.mul(blend.share).add_(exact.roll(1, 0).mul_(1 - blend.share))
    return mixed.to(labels.dtype) if labels.is_floating_point() else mixed


def _one_hot(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return (n, num_classes) float32 with a 1 for each label. Raise OptionError for a label that is no class."""
    labels = labels.long()  # narrow integers wrap ``num_classes`` around, and torch compares no uint16
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        raise OptionError(_wrong_label(int(labels[wrong][0]), num_classes))
    return torch.zeros(len(labels), num_classes, device=labels.device).scatter_(1, labels[:, None], 1)


def _wrong_label(label: int, num_classes: int) -> str:
    return f"a label is {label}, but num_classes is {num_classes}, so that labels are from 0 to {num_classes - 1}"


def _random_of_torch() -> Random:
    return Random(torch.randint(1 << 32, (2,)).numpy().astype(np.uint32))


def _call(transform: AnyMixing, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_classes = check_batch(transform, images, labels)
    axis = channel_axis(tuple(images.shape[1:]))
    blend = transform.blend(_random_of_torch(), images, axis) if len(images) > 1 else NOTHING
    return mix(blend, images, labels, num_classes, axis)
