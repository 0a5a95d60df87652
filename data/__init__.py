"""Data: records -> tokens and masks -> ragged batches by step number."""

# ruff: noqa: I001 - "name as name" is how a typed package exports a name; sorted, each would be a
# statement of its own
from .accounting import Accounting as Accounting
from .batches import (
    Batches as Batches,
    balanced as balanced,
    first_fit as first_fit,
    permutation as permutation,
    token_cost as token_cost,
)
from .chat import (
    check_same_vocabulary as check_same_vocabulary,
    read_chat_template as read_chat_template,
    vocabulary_differences as vocabulary_differences,
)
from .encode import (
    Encode as Encode,
    Parts as Parts,
    encode_preference as encode_preference,
    encode_prompts as encode_prompts,
    encode_ranking as encode_ranking,
    encode_rows as encode_rows,
    encode_scores as encode_scores,
    encode_stepwise as encode_stepwise,
    encode_supervised as encode_supervised,
    encode_triples as encode_triples,
    encode_unpaired as encode_unpaired,
    example as example,
    prompt_tokens as prompt_tokens,
    step_example as step_example,
)
from .examples import Example as Example, Tokenization as Tokenization
from .mixture import (
    concatenated as concatenated,
    load_data as load_data,
    part_of as part_of,
    where as where,
)
from .stream import Stream as Stream, StreamBatches as StreamBatches
from .records import DataError as DataError, Records as Records, load as load
