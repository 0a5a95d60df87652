"""Images of conversations: references, pictures, and the text and tensors made of each.

An image stays a file, or the bytes of one, until a model reads it. In a message it is the character
`HOLE` of the text; the chat template writes the processor's placeholder there, and the processor
says which text each image becomes. No list of architectures is needed.
"""

import base64
import binascii
import copy
import hashlib
import io
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from datasets import Features, Image, List, Value

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from torch import Tensor

HOLE = "\ufffc"  # the object replacement character: an image in the text of a message

# Outputs of a processor that describe the text and not the images.
_OF_TEXT = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "special_tokens_mask",
    "text_replacement_offsets",
}
_CACHED = 1 << 29  # bytes of processed images that a reader keeps


class ImageError(ValueError):
    """An image that can't be read or processed; the message names it."""


class ImageRef(NamedTuple):
    """An image that is not decoded yet, and the run of tokens that it becomes.

    Attributes:
        path: of a local file; "" for bytes that have no name.
        content: the bytes of the file; None to read them from ``path``.
        digest: of the bytes, in hexadecimal digits, when the row was encoded.
        stamp: size and time of the file then, which say at once that it is the same; "" for bytes.
        start: the index of its first image token in the prompt, or in the prompt and the completion
            that follows.
        length: tokens from the first to the last image token, row and column marks between them
            included.
    """

    path: str
    content: bytes | None = None
    digest: str = ""
    stamp: str = ""
    start: int = 0
    length: int = 0

    @property
    def key(self) -> bytes:
        """Two references with one key are one picture."""
        return bytes.fromhex(self.digest or digest_of(self.content or b""))

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path or f"{len(self.content or b''):,} bytes without a name"


IMAGE_FEATURE = List(
    {
        "path": Value("string"),
        "content": Value("binary"),
        "digest": Value("string"),
        "stamp": Value("string"),
        "start": Value("int32"),
        "length": Value("int32"),
    }
)


def reference(value: object) -> ImageRef:
    """A reference of what a row holds of an image.

    Args:
        value: a path, a data: or file: URL, bytes, or a mapping with ``bytes``, ``base64`` or
            ``path``, as the Image feature of `datasets` stores one.

    Raises:
        ImageError: if it is none of these.
    """
    if isinstance(value, bytes):
        return ImageRef("", value)
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, Mapping):
        path = str(value.get("path") or "")
        if value.get("bytes"):
            return ImageRef(path, bytes(value["bytes"]))
        if value.get("base64"):
            return ImageRef(path, _decoded(str(value["base64"])))
        for name in ("path", "url"):
            if isinstance(value.get(name), str):
                return _of_text(value[name])
    raise ImageError(
        f"an image is {type(value).__name__}, wanted a path, bytes, or {{path, bytes}}; convert it"
    )


def _of_text(text: str) -> ImageRef:
    if text.startswith("data:"):
        _, _, encoded = text.partition(",")
        return ImageRef("", _decoded(encoded))
    if text.startswith(("http://", "https://")):
        raise ImageError(f"the image {text:.80} is on a network; download it, and give its path")
    return ImageRef(text.removeprefix("file://"))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ImageError(f"an image is text that is no base64: {text:.40}; give its path") from None


def found(image: ImageRef, folder: str) -> ImageRef:
    """The reference with the whole path and the stamp of its file.

    Args:
        folder: the directory of the data file, where relative paths begin.

    Raises:
        ImageError: if there is no such file.
    """
    if image.content is not None:
        return image._replace(digest=digest_of(image.content))
    path = os.path.abspath(os.path.join(folder, image.path))
    stamp = stamp_of(path)
    if not stamp:
        raise ImageError(f"there is no image {path}; correct the path, or remove the row")
    return image._replace(path=path, digest=digest_of(Path(path).read_bytes()), stamp=stamp)


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def is_same(path: str, stamp: str, digest: str) -> bool:
    """True if a file holds what it held when its row was encoded."""
    found_stamp = stamp_of(path)
    if found_stamp == stamp:
        return True
    return bool(found_stamp) and digest_of(Path(path).read_bytes()) == digest


def stamp_of(path: str) -> str:
    """Size and time of a file; "" if there is none."""
    if not os.path.isfile(path):
        return ""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def decoded(image: ImageRef) -> "Picture":
    """The picture in RGB, upright: the rotation that EXIF tells of is done.

    Transparency is dropped, as processors of transformers do; 16 bits a channel become 8.

    Raises:
        ImageError: if it is no picture, is damaged, or its file changed since the row was encoded.
    """
    from PIL import Image as pillow
    from PIL import ImageOps, UnidentifiedImageError

    content = image.content
    if content is None:
        if not is_same(image.path, image.stamp, image.digest):
            raise ImageError(
                f"the image {image.path} was changed or removed since its row was encoded; start again"
            )
        content = Path(image.path).read_bytes()
    try:
        opened: Picture = pillow.open(io.BytesIO(content))
        upright = ImageOps.exif_transpose(opened)
        return _in_rgb(upright)
    except (UnidentifiedImageError, pillow.DecompressionBombError, OSError, SyntaxError) as error:
        raise ImageError(
            f"the image {image.name} can't be read ({error}); replace it, or remove the row"
        ) from None


def as_png(image: ImageRef) -> bytes:
    """The file of the picture as `decoded` gives it, without loss, for another program."""
    return _png(decoded(image))


def _in_rgb(picture: "Picture") -> "Picture":
    from PIL import Image as pillow

    if picture.mode == "F":
        raise ImageError("an image holds floating-point values; save it with 8 or 16 bits")
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        # Pillow would cut values above 255 off.
        values = np.asarray(picture).astype(np.int64)
        return pillow.fromarray((values >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    return picture.convert("RGB")


class Processed(NamedTuple):
    """What a processor makes of the images of one conversation.

    Attributes:
        texts: of each image, the text that takes the place of its placeholder.
        counts: of each image, the number of its image tokens.
        tensors: the inputs of the model, by name.
    """

    texts: list[str]
    counts: list[int]
    tensors: "dict[str, Tensor]"


class ImageReader:
    """The processor of a vision-language model, for the images of one conversation at a time.

    What it made of the last images is kept: they are read once a step, however many models see
    them. Those that are expected are read in a thread meanwhile.

    Attributes:
        processor: of transformers.
        placeholder: the text that a chat template writes for each image.
        token: the id that stands for an image's features in the model's input, once for each: the
            special token that is most frequent in the text of an image.
        other_tokens: ids that stand for other media, such as videos.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.placeholder = str(processor.image_token)
        self._kept: OrderedDict[tuple[bytes, ...], Processed] = OrderedDict()
        self._size = 0
        self._ahead: dict[tuple[bytes, ...], tuple[int, Future[Processed | None]]] = {}
        self._expectations = 0
        self.token = 0
        self.token = self._most_frequent(self._call([_blank()], processor)[0][0])
        self.other_tokens = self._other_tokens()
        self.read([self.blank])  # refuses a processor that makes nothing of an image

    def __deepcopy__(self, memo: dict[int, object]) -> "ImageReader":
        return self  # a copied model shares its processor, and what was read

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def blank(self) -> ImageRef:
        """A small gray image, for batches that have none."""
        return ImageRef("blank", _png(_blank()))

    @property
    def dark(self) -> ImageRef:
        """Another image of the same size."""
        return ImageRef("dark", _png(_blank(20)))

    @property
    def stop_tokens(self) -> set[int]:
        """The ids that no completion may hold but at its end: nothing could be seen there."""
        return {self.token, *self.other_tokens}

    def read(self, images: Sequence[ImageRef]) -> Processed:
        """The text and tensors of all images of one conversation.

        They are read together: some processors cut an image into tiles only if it is alone.

        Raises:
            ImageError: if one of them can't be decoded, or the processor refuses them.
        """
        key = _key(images)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        processed = self._read_meanwhile(key) or self._process(images, self.processor)
        self._keep(key, processed)
        return processed

    def expect(self, conversations: Iterable[Sequence[ImageRef]]) -> None:
        """Read the images of these conversations in a thread, in this order, until they will be
        asked for.

        They take at most half as much memory as what is kept. What was expected before, but for the
        last time, and was not asked for, is let go of.
        """
        self._expectations += 1
        for key, (number, future) in list(self._ahead.items()):
            if number < self._expectations - 1:
                future.cancel()
                del self._ahead[key]
        for images in conversations:
            key = _key(images)
            if images and key not in self._kept and key not in self._ahead:
                future = self._thread.submit(self._read_ahead, images)
                self._ahead[key] = (self._expectations, future)

    def forget(self) -> None:
        """Expect nothing any more."""
        for _, future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "burnish-images")

    @cached_property
    def _processor_ahead(self) -> Any:
        # Tokenizers of two threads may not be one: "Already borrowed".
        return copy.deepcopy(self.processor)

    def _read_ahead(self, images: Sequence[ImageRef]) -> Processed | None:
        """In the thread: None where there is no room, or where reading will say what is wrong."""
        held = 0
        for _, future in list(self._ahead.values()):
            if future.done() and not future.cancelled():
                read = future.result()
                held += 0 if read is None else _bytes(read)
        if held >= _CACHED // 2:
            return None
        try:
            return self._process(images, self._processor_ahead)
        except Exception:
            return None

    def _read_meanwhile(self, key: tuple[bytes, ...]) -> Processed | None:
        """What the thread made of the images; None if it has not begun."""
        if key not in self._ahead:
            return None
        _, future = self._ahead.pop(key)
        return None if future.cancel() else future.result()

    def _process(self, images: Sequence[ImageRef], processor: Any) -> Processed:
        pictures = [decoded(image) for image in images]
        try:
            texts, tensors = self._call(pictures, processor)
        except ValueError as error:
            names = ", ".join(image.name for image in images)
            sizes = ", ".join(f"{picture.width}x{picture.height}" for picture in pictures)
            raise ImageError(
                f"the processor refuses the image {names} ({sizes} pixels): {error}; "
                "crop or pad it, or remove the row"
            ) from None
        counts = [_ids_by(processor.tokenizer, text).count(self.token) for text in texts]
        return Processed(texts, counts, tensors)

    def with_placeholders(self, prompt: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """The prompt with a placeholder in place of the text of each image.

        It is what another program with the same processor, such as vLLM, makes the prompt of.

        Raises:
            ImageError: if the text of an image is not where its reference says.
        """
        short = list(prompt)
        shown = list(zip(images, self.read(images).texts, strict=True)) if images else []
        for image, text in reversed(shown):
            ids = self._ids(text)
            start = image.start - ids.index(self.token)
            if short[start : start + len(ids)] != ids:
                raise ImageError(
                    f"the text of the image {image.name} is not at token {start} of its prompt; encode its row again"
                )
            short[start : start + len(ids)] = self._ids(self.placeholder)
        return short

    def _keep(self, key: tuple[bytes, ...], processed: Processed) -> None:
        self._kept[key] = processed
        self._size += _bytes(processed)
        while self._size > _CACHED and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._size -= _bytes(oldest)

    def _call(
        self, pictures: "Sequence[Picture]", processor: Any
    ) -> "tuple[list[str], dict[str, Tensor]]":
        out = processor(
            text=[self.placeholder * len(pictures)],
            images=[list(pictures)],
            return_text_replacement_offsets=True,
            return_mm_token_type_ids=False,
            return_tensors="pt",
        )
        texts = [each["replacement"] for each in out["text_replacement_offsets"][0]]
        tensors = {name: value for name, value in out.items() if name not in _OF_TEXT}
        return texts, tensors

    def _ids(self, text: str) -> list[int]:
        return _ids_by(self.tokenizer, text)

    def _most_frequent(self, text: str) -> int:
        added = self.tokenizer.added_tokens_decoder
        return Counter(token for token in self._ids(text) if token in added).most_common(1)[0][0]

    def _other_tokens(self) -> set[int]:
        names = [getattr(self.processor, f"{kind}_token", None) for kind in ("video", "audio")]
        known = self.tokenizer.get_vocab()
        return {known[name] for name in names if isinstance(name, str) and name in known}


def _key(images: Sequence[ImageRef]) -> tuple[bytes, ...]:
    return tuple(image.key for image in images)


def _ids_by(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _bytes(processed: Processed) -> int:
    return sum(tensor.nbytes for tensor in processed.tensors.values())


def _blank(gray: int = 120) -> "Picture":
    from PIL import Image as pillow

    return pillow.new("RGB", (32, 32), (gray, gray, gray))


def _png(picture: "Picture") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def undecoded(features: Features) -> Features:
    """The features, in which images stay the files that they are."""
    return Features({name: _undecoded(kind) for name, kind in features.items()})


def _undecoded(kind: object) -> object:
    if isinstance(kind, Image):
        return Image(decode=False)
    if isinstance(kind, dict):
        return {name: _undecoded(inner) for name, inner in kind.items()}
    if isinstance(kind, List):
        return List(_undecoded(kind.feature), length=kind.length)
    return kind


def with_text_for_pictures(value: Any) -> Any:
    """A value of a row whose PIL images and bytes within messages are base64: JSON holds neither."""
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):  # as the Image feature of `datasets` stores one
            return {"path": value.get("path"), **with_text_for_pictures(value["bytes"])}
        return {name: with_text_for_pictures(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_text_for_pictures(inner) for inner in value]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if type(value).__module__.startswith("PIL."):
        buffer = io.BytesIO()
        lossless = "TIFF" if value.mode in ("CMYK", "F", "YCbCr", "LAB", "HSV") else "PNG"
        value.save(buffer, format=lossless)
        return {"base64": base64.b64encode(buffer.getvalue()).decode()}
    return value
