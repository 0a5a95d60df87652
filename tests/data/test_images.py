"""Rows with images: where they are shown, what tokens they become, and what is refused."""

import base64
import io
import json
import threading
from concurrent.futures import wait

import pytest
import torch
import vision
from burnish.data import (
    DataError,
    Example,
    Tokenization,
    encode_preference,
    encode_prompts,
    encode_stepwise,
    encode_supervised,
    encode_unpaired,
    example,
    images,
    load,
    token_cost,
)
from burnish.data.images import ImageReader, decoded, reference
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as pillow

QUESTION = {"role": "user", "content": "what color?"}
RED = {"role": "assistant", "content": "red"}
BLUE = {"role": "assistant", "content": "blue"}
IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def reader():
    return ImageReader(vision.make("llava")[1])


@pytest.fixture(scope="module")
def encode(reader):
    def encode(row, by=encode_supervised, **options):
        data, account = by([row], reader, Tokenization(**options))
        return example(data, 0), account

    return encode


def shown(reader, one):
    """Where image tokens are in an example, and where it says that its images are."""
    ids = one.prompt + (one.completions[0] if one.completions else [])
    tokens = [place for place, token in enumerate(ids) if token == reader.token]
    runs = [
        place for image in one.images for place in range(image.start, image.start + image.length)
    ]
    return tokens, runs


def png(picture):
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


# ---- where images come from


@pytest.mark.parametrize("form", ["picture", "bytes", "path", "mapping", "base64", "data url"])
def test_every_form_of_an_image_is_the_same_picture(form, reader, encode, tmp_path):
    picture = vision.picture(30, 20, "red")
    file = tmp_path / "red.png"
    file.write_bytes(png(picture))
    encoded = base64.b64encode(png(picture)).decode()
    forms = {
        "picture": picture,
        "bytes": png(picture),
        "path": str(file),
        "mapping": {"bytes": png(picture), "path": None},
        "base64": {"base64": encoded},
        "data url": f"data:image/png;base64,{encoded}",
    }
    in_column = {"image": forms[form], "prompt": [QUESTION], "completion": [RED]}
    part = {"type": "image", "image": forms[form]}
    in_message = {"prompt": [{"role": "user", "content": [part, text("what color?")]}]}
    for row in (in_column, {**in_message, "completion": [RED]}):
        one, account = encode(row)
        tokens, runs = shown(reader, one)
        assert tokens == runs and len(tokens) == 4
        assert decoded(one.images[0]).tobytes() == picture.tobytes()
        assert (account.images, account.image_tokens) == (1, 4)
        assert "; 1 images, 4 of the tokens" in str(account)


def test_paths_are_relative_to_the_data_file(reader, tmp_path):
    vision.picture(color="blue").save(tmp_path / "a.png")
    row = {"prompt": [QUESTION], "images": ["a.png"], "completion": [BLUE]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data, _ = encode_supervised(load(tmp_path / "rows.jsonl"), reader)
    assert decoded(example(data, 0).images[0]).getpixel((39, 39)) == (0, 0, 255)


def test_a_dataset_with_the_image_feature_is_read(reader):
    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"images": List(Image()), "prompt": List(message)})
    rows = {"images": [[vision.picture()]], "prompt": [[QUESTION]]}
    data, _ = encode_prompts(Dataset.from_dict(rows, features=features), reader)
    assert len(example(data, 0).images) == 1


def test_text_and_image_rows_are_in_one_dataset(reader):
    rows = [
        {"prompt": [QUESTION], "completion": [RED], "images": [vision.picture()]},
        {"prompt": [QUESTION], "completion": [BLUE], "images": []},
        {"prompt": [QUESTION], "completion": [BLUE], "images": None},
    ]
    data, account = encode_supervised(rows, reader)
    assert [len(example(data, i).images) for i in range(3)] == [1, 0, 0]
    assert account.images == 1


def test_parts_of_a_mixture_keep_their_images(reader, tmp_path):
    vision.picture().save(tmp_path / "a.png")
    row = {"prompt": [QUESTION], "completion": [RED]}
    (tmp_path / "text.jsonl").write_text(json.dumps(row))
    (tmp_path / "seen.jsonl").write_text(json.dumps({**row, "image": "a.png"}))
    parts = [load(tmp_path / "text.jsonl"), load(tmp_path / "seen.jsonl")]
    data, account = encode_supervised(parts, reader)
    assert [len(example(data, i).images) for i in range(2)] == [0, 1]
    assert account.images == 1


# ---- where they are shown


def test_images_of_a_column_come_before_the_users_first_text(reader, encode):
    system = {"role": "system", "content": "Look."}
    row = {"images": [vision.picture()] * 2, "prompt": [system, QUESTION], "completion": [RED]}
    decoded_text = reader.tokenizer.decode(encode(row)[0].prompt)
    assert "user\n" + "<image>" * 8 + "what color?" in decoded_text


def test_parts_take_the_images_of_a_column_in_order(reader, encode):
    content = [text("first "), IMAGE, text(" second "), IMAGE]
    colors = ["red", "blue"]
    one, _ = encode(
        {
            "images": [vision.picture(color=color) for color in colors],
            "messages": [{"role": "user", "content": content}, RED],
        }
    )
    assert "first " + "<image>" * 4 + " second " + "<image>" * 4 in reader.tokenizer.decode(
        one.prompt
    )
    pixels = [decoded(image).getpixel((39, 39)) for image in one.images]
    assert pixels == [(255, 0, 0), (0, 0, 255)]


def test_a_later_turn_of_a_conversation_may_show_an_image(reader, encode):
    later = {"role": "user", "content": [IMAGE, text("and this?")]}
    row = {"images": [vision.picture(), vision.picture()]}
    first = {"role": "user", "content": [IMAGE, text("what?")]}
    one, _ = encode({**row, "messages": [first, RED, later, BLUE]})
    tokens, runs = shown(reader, one)
    assert tokens == runs and len(one.images) == 2
    assert one.images[1].start >= len(one.prompt)
    trained = [
        token for token, train in zip(one.completions[0], one.trained[0], strict=True) if train
    ]
    assert reader.tokenizer.decode(trained) == "red<|end|>blue<|end|>"


def test_image_tokens_are_never_trained(reader, encode):
    row = {"image": vision.picture(), "messages": [QUESTION, RED]}
    data, _ = encode_supervised([row], reader, train_on="all")
    one = example(data, 0)
    trained = dict(zip(one.completions[0], one.trained[0], strict=True))
    assert trained.get(reader.token) is False


def test_the_cost_of_a_row_counts_the_tokens_of_its_images(reader):
    row = {"prompt": [QUESTION], "chosen": [RED], "rejected": [BLUE]}
    data, _ = encode_preference([row, {**row, "image": vision.picture()}], reader)
    once = token_cost(data, shared_prompt=True)
    each = token_cost(data, shared_prompt=False)
    assert once[1] - once[0] == 4 and each[1] - each[0] == 8


def test_both_completions_of_an_implicit_prompt_share_its_image(reader):
    row = {"image": vision.picture(), "chosen": [QUESTION, RED], "rejected": [QUESTION, BLUE]}
    data, _ = encode_preference([row], reader)
    one = example(data, 0)
    assert len(one.images) == 1 and len(one.completions) == 2
    data, _ = encode_unpaired([row], reader)
    assert [len(example(data, i).images) for i in range(2)] == [1, 1]


def test_a_template_of_parts_alone_still_gets_text(reader):
    processor = vision.make("llava")[1]
    parts_alone = vision.template().replace(
        "{% if m.content is string %}{{ m.content }}{% else %}", ""
    )
    parts_alone = parts_alone.replace("{% endfor %}{% endif %}<|end|>", "{% endfor %}<|end|>")
    processor.tokenizer.chat_template = parts_alone
    row = {"image": vision.picture(), "messages": [QUESTION, RED]}
    data, _ = encode_supervised([row, {**row, "image": None}], ImageReader(processor))
    expected, _ = encode_supervised([row, {**row, "image": None}], reader)
    assert [example(data, i) for i in (0, 1)] == [example(expected, i) for i in (0, 1)]


def test_generation_marks_of_a_template_do_not_shift(reader):
    processor = vision.make("llava")[1]
    marked = vision.template().replace(
        "<|end|>\n{% endfor %}", "<|end|>{% endgeneration %}{{ '\\n' }}{% endfor %}"
    )
    marked = marked.replace("{{ m.role }}\n", "{{ m.role }}\n{% generation %}", 1)
    processor.tokenizer.chat_template = marked
    row = {"image": vision.picture(), "messages": [QUESTION, RED]}
    data, _ = encode_supervised([row], ImageReader(processor))
    expected, _ = encode_supervised([row], reader)
    assert example(data, 0) == example(expected, 0)


def test_steps_of_a_solution_follow_an_image(reader):
    row = {
        "image": vision.picture(),
        "prompt": [QUESTION],
        "completions": ["a", "b"],
        "labels": [1, 0],
    }
    data, _ = encode_stepwise([row], reader)
    tokens, runs = shown(reader, example(data, 0))
    assert tokens == runs and tokens


def test_the_same_question_about_other_images_is_no_contradiction(reader):
    answers = {"prompt": [QUESTION], "chosen": [RED], "rejected": [BLUE]}
    swapped = {"prompt": [QUESTION], "chosen": [BLUE], "rejected": [RED]}
    red, blue = vision.picture(color="red"), vision.picture(color="blue")
    rows = [{**answers, "image": red}, {**swapped, "image": blue}]
    assert encode_preference(rows, reader)[1].contradictory == 0
    same = [{**answers, "image": red}, {**swapped, "image": red}]
    assert encode_preference(same, reader)[1].contradictory == 2


# ---- truncation


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end", "error"])
@pytest.mark.parametrize("kind", ["demonstration", "pair", "conversation", "all", "prompt"])
def test_an_image_is_never_cut_at_any_length(kind, truncation, reader):
    image = vision.picture()
    prompt = [{"role": "user", "content": [text("see"), IMAGE, text("color?")]}]
    rows = {
        "demonstration": (encode_supervised, {"prompt": prompt, "completion": [RED]}),
        "pair": (encode_preference, {"prompt": prompt, "chosen": [RED], "rejected": [BLUE]}),
        "conversation": (
            encode_supervised,
            {"messages": [*prompt, RED, *prompt, BLUE], "images": [image, image]},
        ),
        "all": (encode_supervised, {"messages": [*prompt, RED]}),
        "prompt": (encode_prompts, {"prompt": prompt}),
    }
    by, row = rows[kind]
    extra = {"train_on": "all"} if kind == "all" else {}
    row = {"images": [image], **row}
    whole = example(by([row], reader, **extra)[0], 0)
    longest = len(whole.prompt) + max(map(len, whole.completions), default=0)
    kept = 0
    good = {"prompt": "a", "completion": "b"} if by is encode_supervised else {"prompt": "a"}
    good |= {"chosen": "b", "rejected": "c"} if by is encode_preference else {}
    for length in range(2, longest + 1):
        options = Tokenization(length, truncation, "skip", cached=False)
        try:
            data, account = by([row], reader, options, **extra)
        except DataError as error:  # no row is left: it was counted
            assert "1 skipped" in str(error)
            continue
        kept += 1
        one = example(data, 0)
        tokens, runs = shown(reader, one)
        assert tokens == runs and tokens == sorted(tokens)
        assert len(tokens) == 4 * len(one.images)
        if truncation == "keep_start" and kind != "prompt":
            assert whole.prompt == one.prompt
            pairs = zip(one.completions, whole.completions, strict=True)
            assert all(long[: len(short)] == short for short, long in pairs)
        assert account.images == len(one.images)
        if kind not in ("conversation", "all"):  # they may end before an image
            assert len(one.images) == 1
    assert kept >= 1


# ---- mistakes


def row_with(**changes):
    return {"prompt": [QUESTION], "completion": [RED], "image": vision.picture(), **changes}


def bad_rows(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    shows_two = {"role": "user", "content": [IMAGE, IMAGE, text("?")]}
    return {
        "corrupt": (row_with(image=str(tmp_path / "bad.png")), "bad.png can't be read"),
        "missing": (
            row_with(image="nowhere.png"),
            "there is no image .*nowhere.png; correct the path",
        ),
        "too many parts": (
            row_with(prompt=[shows_two]),
            "2 image parts name no image, and the row has 1 images",
        ),
        "no image": (
            row_with(prompt=[shows_two], image=None),
            "2 image parts name no image, and the row has 0 images",
        ),
        "network": (row_with(image="https://x.org/a.png"), "is on a network; download it"),
        "no base64": (row_with(image={"base64": "?"}), "text that is no base64"),
        "another type": (row_with(image=7), "an image is int, wanted a path"),
        "plain": (
            row_with(prompt="what?", completion="red"),
            "the row has images and its prompt is plain text; give a list of messages",
        ),
        "typed": (
            row_with(prompt=[{"role": "user", "content": "an <image> here"}]),
            "the chat template writes 2 times <image> for 1 images",
        ),
        "typed alone": (
            row_with(prompt=[{"role": "user", "content": "an <image> here"}], image=None),
            "a message holds the text <image>, which stands for what the model sees",
        ),
        "typed by the assistant": (
            row_with(completion=[{"role": "assistant", "content": "an <image>"}]),
            "a message holds the text <image>|2 times <image> for 1 images",
        ),
        "the assistant's": (
            row_with(completion=[{"role": "assistant", "content": [IMAGE, text("see")]}]),
            "of the role assistant, has an image; wanted images in the user's",
        ),
        "a hole": (
            row_with(prompt=[{"role": "user", "content": "what \ufffc?"}]),
            "the character U\\+FFFC, which stands for images",
        ),
        "a key": (
            row_with(prompt=[{**QUESTION, "images": ["a.png"]}]),
            "has a key 'images'; give them as parts",
        ),
        "no user": (
            {"prompt": [{"role": "tool", "content": "4"}], "image": vision.picture()},
            "no message of the user's to show them",
        ),
    }


KINDS = [
    "corrupt", "missing", "too many parts", "no image", "network", "no base64", "another type",
    "plain", "typed", "typed alone", "typed by the assistant", "the assistant's", "a hole", "a key",
    "no user",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_image_is_an_error_that_names_the_row(kind, reader, tmp_path):
    row, problem = bad_rows(tmp_path)[kind]
    by = encode_prompts if kind == "no user" else encode_supervised
    with pytest.raises(DataError, match=f"records row 1: .*({problem})"):
        by([row], reader)
    fine = {**row_with(), **({} if by is encode_supervised else {"prompt": [QUESTION]})}
    # a column holds images of one form
    if kind not in ("network", "no base64", "another type", "corrupt", "missing"):
        _, account = by([row, fine], reader, Tokenization(on_bad_row="skip"))
        assert account.kept == 1 and sum(account.skipped.values()) == 1


def test_images_for_a_model_of_text_are_refused(reader):
    tokenizer = reader.tokenizer
    with pytest.raises(DataError, match="column 'image': the model reads text alone; train a"):
        encode_supervised([row_with()], tokenizer)
    in_message = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    with pytest.raises(DataError, match=r"row 1: .*a part of the type 'image', wanted text"):
        encode_supervised([{"prompt": [in_message], "completion": [RED]}], tokenizer)


def test_an_image_prompt_that_is_too_long_is_named(reader):
    with pytest.raises(
        DataError, match=r"row 1: the prompt|row 1: .*tokens precede the first trained"
    ):
        encode_supervised([row_with()], reader, Tokenization(max_length=8))
    with pytest.raises(DataError, match=r"row 1: .* tokens and max_length is 8"):
        encode_prompts([row_with()], reader, Tokenization(max_length=8))


@pytest.mark.parametrize("mode", ["CMYK", "P", "L", "LA", "RGBA", "1", "I;16"])
def test_pictures_of_every_mode_become_rgb(mode, reader):
    gray = vision.picture(color=(204, 204, 204))
    picture = gray.convert("I").point(lambda value: value * 257).convert("I;16") if mode == "I;16" else (
        gray.convert(mode)
    )  # fmt: skip
    buffer = io.BytesIO()
    picture.save(buffer, format="TIFF" if mode == "CMYK" else "PNG")
    seen = decoded(reference(buffer.getvalue()))
    assert seen.mode == "RGB" and seen.size == (40, 40)
    expected = 255 if mode == "1" else 204
    assert all(abs(channel - expected) <= 2 for channel in seen.getpixel((39, 39)))


def test_the_rotation_that_exif_tells_of_is_done():
    picture = vision.picture(30, 20)
    exif = pillow.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", exif=exif)
    assert decoded(reference(buffer.getvalue())).size == (20, 30)


def test_an_image_that_the_processor_refuses_is_told_by_row_or_counted(
    reader, tmp_path, monkeypatch
):
    """As those of Qwen refuse an aspect ratio of 200, which needs torchvision."""
    call = ImageReader._call

    def refusing(self, pictures, processor):
        if any(max(each.size) > 200 * min(each.size) for each in pictures):
            raise ValueError("absolute aspect ratio must be smaller than 200, got 5000.0")
        return call(self, pictures, processor)

    monkeypatch.setattr(ImageReader, "_call", refusing)
    vision.picture(1, 5000).save(tmp_path / "long.png")
    rows = [row_with(image=vision.picture()), row_with(image=vision.picture(1, 5000))]
    with pytest.raises(
        DataError,
        match=r"records row 2: the processor refuses the image .* \(1x5000 pixels\): absolute "
        r"aspect ratio .*; crop or pad it, or remove the row; --on_bad_row skip",
    ):
        encode_supervised(rows, reader)
    _, account = encode_supervised(rows, reader, Tokenization(on_bad_row="skip"))
    assert account.kept == 1 and sum(account.skipped.values()) == 1
    with pytest.raises(DataError, match=r"refuses the image .*long.png \(1x5000"):
        encode_supervised([row_with(image=str(tmp_path / "long.png"))], reader)


def test_a_file_that_changed_after_its_row_was_encoded_is_refused(reader, tmp_path):
    file = tmp_path / "a.png"
    vision.picture().save(file)
    data, _ = encode_supervised([row_with(image=str(file))], reader)
    (image,) = example(data, 0).images
    vision.picture(50, 50).save(file)
    with pytest.raises(ValueError, match=r"a.png was changed or removed since its row was encoded"):
        ImageReader(reader.processor).read([image])


def test_rows_whose_file_changed_are_encoded_again(reader, tmp_path):
    vision.picture(color="red").save(tmp_path / "a.png")
    row = {"prompt": [QUESTION], "image": "a.png", "completion": [RED]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    encode_supervised(load(tmp_path / "rows.jsonl"), reader)
    vision.picture(50, 50, "blue").save(tmp_path / "a.png")
    data, _ = encode_supervised(load(tmp_path / "rows.jsonl"), reader)
    assert decoded(example(data, 0).images[0]).size == (50, 50)


def test_an_image_is_read_once_for_all_models(reader, monkeypatch):
    calls = []
    reader = ImageReader(reader.processor)
    call = reader._call
    monkeypatch.setattr(reader, "_call", lambda *given: calls.append(1) or call(*given))
    data, _ = encode_supervised([row_with()], reader)
    one = example(data, 0)
    for _ in range(3):
        reader.read(one.images)
    assert len(calls) == 1


@pytest.fixture
def counted(reader):
    """A reader, and the threads in which it processed images."""
    reader = ImageReader(reader.processor)
    threads = []
    call = reader._call
    reader._call = lambda *given: threads.append(threading.current_thread().name) or call(*given)
    yield reader, threads
    reader.forget()


def pictures_of(*colors):
    return [[reference(png(vision.picture(color=color)))] for color in colors]


def test_expected_images_are_read_in_a_thread_as_they_would_be(counted, reader):
    ahead, threads = counted
    given = pictures_of("red", "blue", "red")
    ahead.expect(given)
    wait([future for _, future in ahead._ahead.values()])
    for shown in given:
        read, expected = ahead.read(shown), reader.read(shown)
        assert read.texts == expected.texts and read.counts == expected.counts
        assert all(torch.equal(read.tensors[name], expected.tensors[name]) for name in read.tensors)
    assert len(threads) == 2 and all("burnish-images" in name for name in threads)
    assert not ahead._ahead


def test_what_is_expected_takes_half_of_the_memory_of_what_is_kept(counted, monkeypatch):
    ahead, _ = counted
    given = pictures_of("red", "blue", "green", "white")
    size = sum(tensor.nbytes for tensor in ahead.read(given[0]).tensors.values())
    monkeypatch.setattr(images, "_CACHED", 2 * size + 2)
    ahead.expect(given[1:])
    wait([future for _, future in ahead._ahead.values()])
    assert sum(future.result() is not None for _, future in ahead._ahead.values()) == 2
    for each in given:
        assert ahead.read(each).counts == [4]


def test_a_fault_of_an_expected_image_is_told_where_it_is_read(counted):
    ahead, _ = counted
    bad = [reference(b"no picture")]
    ahead.expect([bad])
    wait([future for _, future in ahead._ahead.values()])
    with pytest.raises(ValueError, match="can't be read"):
        ahead.read(bad)


def test_what_was_expected_and_not_read_is_let_go_of(counted):
    ahead, _ = counted
    red, blue, green = pictures_of("red", "blue", "green")
    ahead.expect([red])
    ahead.expect([blue])
    assert len(ahead._ahead) == 2  # a step's are expected while the one before is computed
    ahead.expect([green])
    assert len(ahead._ahead) == 2


def test_examples_of_text_are_as_before(reader):
    row = {"prompt": [QUESTION], "completion": [RED]}
    seen, _ = encode_supervised([row], reader)
    read, _ = encode_supervised([row], reader.tokenizer)
    assert "images" not in read.column_names
    assert example(seen, 0) == example(read, 0)
    assert Example([1], [[2]], [[True]]).images == ()
