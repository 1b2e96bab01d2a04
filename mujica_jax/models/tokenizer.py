"""Convert text to token ids and back, and keep untrusted text free of special tokens.

There are three kinds of text, and an encoder for each:

- the chat template's scaffold, whose special tokens count;
- a model's own words, whose protocol tags count;
- everything else, which never encodes to a special or added token, whatever it says.

Conversations are rendered turn by turn from the pieces of the chat template. So text that was
encoded once is never encoded again.
"""

import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from mujica_jax.errors import UserError
from mujica_jax.models.chat_template import FIRST_SURROGATE, ChatPieces, read_messages, take_apart
from mujica_jax.models.companions import read_json, refuse_pointer, stop_tokens
from mujica_jax.models.thoughts import within_opened_thought

PROTOCOL_TAGS = ("think", "search", "action", "answer", "select", "sentence", "information")
END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
# Llama-3.1 templates print the date of the call unless they are told one: a run would not repeat on
# another day.
TEMPLATE_DATE = "26 Jul 2024"
# Neutralised in what comes from outside; the last ones are no tokens.
UNTRUSTED_TAGS = (*PROTOCOL_TAGS, "reflect", "question", "recall")
TAG_PATTERN = re.compile(rf"<(\s*/?\s*(?:{'|'.join(UNTRUSTED_TAGS)})\s*/?\s*)>", re.IGNORECASE)
# Read by transformers where they stand beside tokenizer.json; each holds a JSON object.
JSON_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
SPECIAL_TOKENS = {
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def neutralise(text: str) -> str:
    """Return untrusted text without our protocol's tags.

    Their angle brackets are replaced: `< Answer >` becomes `‹ Answer ›`.
    """
    return TAG_PATTERN.sub(r"‹\1›", text)


# GPT-2's words, except that a number in brackets is one word: a small model that names line [2]
# then copies a token that stands once in its context, where "[", "2" and "]" would each look like
# those of every other line.
WORDS = "|".join(
    (
        r"'s|'t|'re|'ve|'m|'ll|'d",
        r" ?\[-?\d{1,2}\]",
        r" ?\p{L}+",
        r" ?\p{N}+",
        r" ?\[",
        r" ?[^\s\p{L}\p{N}\[]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template."""

    def __init__(
        self,
        wrapped: Any,
        *,
        stop_token_ids: Sequence[int] = (),
        template_place: str = "the chat template",
    ) -> None:
        """Wrap a transformers PreTrainedTokenizerFast.

        The default stop tokens are its end of text and its end of turn. `template_place` says where
        the chat template stands, for errors.
        """
        self._wrapped = wrapped
        self._template_place = template_place
        self._backend: tokenizers.Tokenizer = wrapped.backend_tokenizer

        # The three encoders: all added tokens, protocol tags alone, no added token.
        added_tokens = self._backend.get_added_tokens_decoder().items()
        added = {token.content: id for id, token in added_tokens}
        self._added_ids = frozenset(added.values())
        self._added = _TokenSplitter(added)
        tags = set(_tag_texts(PROTOCOL_TAGS))
        tag_ids = {content: id for content, id in added.items() if content in tags}
        self._tags = _TokenSplitter(tag_ids)
        self._plain = _without_added_tokens(self._backend, added)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

        # Also where stop tokens are given: this takes the chat template apart and so checks it.
        end_ids = [self.end_of_turn_id] if wrapped.chat_template else []
        end_ids.append(wrapped.eos_token_id)
        default_stops = dict.fromkeys(id for id in end_ids if id is not None)
        self.stop_token_ids: tuple[int, ...] = tuple(stop_token_ids) or tuple(default_stops)
        pad_ids = (wrapped.pad_token_id, wrapped.eos_token_id, 0)
        self.pad_token_id: int = next(id for id in pad_ids if id is not None)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Tokenizer":
        """Load a Hugging Face directory with tokenizer.json.

        The stop tokens are those of generation_config.json, if it has any. Raises UserError.
        """
        from transformers import PreTrainedTokenizerFast

        folder = pathlib.Path(directory)
        if not (folder / "tokenizer.json").exists():
            raise UserError(
                f"{folder} has no tokenizer.json: give the directory of a checkpoint with a fast "
                "tokenizer, of a run RUN/policies/N/model"
            )
        stops = stop_tokens(folder)
        template_place = _check_companions(folder)
        try:
            wrapped = PreTrainedTokenizerFast.from_pretrained(folder)
            return cls(wrapped, stop_token_ids=stops, template_place=template_place)
        except UserError:
            raise
        # transformers raises whatever its parsing of a damaged file meets.
        except Exception as error:
            raise UserError(_damage(folder, error)) from error

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and its companions.

        The stop tokens are not written: they stand in the model's generation_config.json.
        """
        self._wrapped.save_pretrained(directory)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_tokens: int, tags: Sequence[str] = PROTOCOL_TAGS
    ) -> "Tokenizer":
        """Train a tokenizer of at most `vocab_tokens` ids.

        They include the special tokens and two tokens for each tag (<tag>, </tag>).

        If there is room for every word of the texts, each word is one token, and any other word is
        spelled in bytes. Then a word that a small model has to copy shares no pieces with other
        words. If there is no such room, the tokenizer is a byte-level BPE.
        """
        from transformers import PreTrainedTokenizerFast

        special = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
        tag_texts = _tag_texts(tags)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        added_count = len(special) + len(tag_texts)
        if vocab_tokens < added_count + len(alphabet):
            raise UserError(
                f"vocab_tokens is {vocab_tokens} but {len(alphabet)} bytes and {added_count} "
                f"special tokens need {added_count + len(alphabet)}: choose at least that many"
            )

        backend = _trained_backend(list(texts), vocab_tokens - added_count, alphabet)
        backend.add_special_tokens(special)
        # Tags are added but not special: decoding must show them even where special tokens are
        # skipped.
        backend.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in tag_texts])

        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=END_OF_TURN,
            pad_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,
        )
        wrapped.chat_template = CHATML_TEMPLATE
        return cls(wrapped)

    def encode_plain(self, text: str) -> list[int]:
        """Encode untrusted text.

        Protocol tags are neutralised, and no special or added token comes out.
        """
        return self.encode_trusted(neutralise(text))

    def encode_trusted(self, text: str) -> list[int]:
        """Encode our own prose, such as a system prompt.

        Tags stay readable as text, and no special or added token comes out.
        """
        ids = self._plain.encode(text, add_special_tokens=False).ids
        assert self._added_ids.isdisjoint(ids), (
            f"plain text was encoded to the added tokens {self._added_ids & set(ids)}"
        )
        return ids

    def encode_model(self, text: str) -> list[int]:
        """Encode text as a model would have written it.

        Protocol tags become their tokens if the vocabulary has such tokens.
        """
        return self._encode(self._tags.split(text))

    def encode_turn(self, text: str) -> list[int]:
        """Encode a model's whole turn.

        If the template opens the turn's thought, the text continues inside of that thought.
        """
        if self.opened_thought:
            text = within_opened_thought(text)
        return self.encode_model(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, with special tokens visible and no white space changed."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, id: int) -> bytes:
        """Return what one token adds to a text, as bytes.

        They need not be whole characters: several tokens may spell one character.
        """
        if 0 <= id < len(self._bytes_of_tokens):
            return self._bytes_of_tokens[id]
        return b""

    @functools.cached_property
    def _bytes_of_tokens(self) -> list[bytes]:
        """The bytes of every token id."""
        decoder = json.loads(self._backend.to_str())["decoder"]
        has_byte_decoder = '"ByteLevel"' in json.dumps(decoder)
        bytes_of_tokens = []
        for id in range(self.vocab_size):
            token = self._backend.id_to_token(id)
            is_byte_level = has_byte_decoder and id not in self._added_ids
            bytes_of_tokens.append(_bytes_of(token, is_byte_level=is_byte_level))
        return bytes_of_tokens

    def open_conversation(
        self, system: str, user: str, examples: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """Return the ids from the first token to the generation prompt.

        `examples` are worked examples, (user message, model's reply) in their order. They stand
        between `system` and `user` as turns of the chat template. If the template itself opens the
        thought of a turn, a reply does not open it again. `user` is untrusted; `system` and
        `examples` are ours.
        """
        if not examples:
            return self._open(system, user)

        # The messages of examples are ours, with the tags that we put into messages.
        first_message, _ = examples[0]
        ids = self._open(system, first_message)
        next_contents = [self._tags.split(self._content(message)) for message, _ in examples[1:]]
        next_contents.append([self._content(neutralise(user))])

        for (_, reply), next_content in zip(examples, next_contents, strict=True):
            ids += self.encode_turn(reply)
            ids += self._continue(next_content, stopped=False)
        return ids

    def _open(self, system: str, user: str) -> list[int]:
        """Return the ids of the system prompt, the first user message and the generation prompt."""
        pieces = self._pieces
        user = self._content(neutralise(user))
        before_user = self._added.split(pieces.before_user)
        before_model = self._added.split(pieces.before_model)
        if pieces.before_system is None:
            return self._encode([*before_user, f"{system}\n\n{user}", *before_model])

        before_system = self._added.split(pieces.before_system)
        system = self._content(system)
        return self._encode([*before_system, system, *before_user, user, *before_model])

    def continue_conversation(
        self, user: str, stopped: bool, *, tag: str | None = None
    ) -> list[int]:
        """Return the ids after a model turn: end of turn, user message, generation prompt.

        The end of turn is left out if the model `stopped`, that is wrote it itself. The message is
        untrusted. With `tag` the message stands inside <tag> and </tag>, and these two are ours.
        """
        content: list[int | str] = [self._content(neutralise(user))]
        if tag is not None:
            opening = self._tags.split(f"<{tag}>\n")
            closing = self._tags.split(f"\n</{tag}>")
            content = [*opening, *content, *closing]
        return self._continue(content, stopped)

    def _continue(self, content: Sequence[int | str], stopped: bool) -> list[int]:
        """Return the ids after a model turn, with the parts of the next user message."""
        after_model = self._added.split(self._pieces.after_model)
        if stopped:
            after_model = after_model[1:]
        before_model = self._added.split(self._pieces.before_model)
        return self._encode([*after_model, *content, *before_model])

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """Return the messages of a conversation, for a chat API.

        The conversation must end where the model writes next. This is the inverse of
        `open_conversation` and `continue_conversation`. Contents are as the conversation holds
        them: untrusted text is neutralised. Raises UserError.
        """
        symbols = _TokenSymbols()
        pieces: dict[str, Any] = {}
        for name, piece in vars(self._pieces).items():
            is_text = isinstance(piece, str)
            pieces[name] = symbols.write(self._added.split(piece)) if is_text else piece

        # The conversation as text, its added tokens as symbols.
        texts = []
        for is_added, run in itertools.groupby(ids, self._added_ids.__contains__):
            run_ids = list(run)
            texts.append(symbols.write(run_ids) if is_added else self.decode(run_ids))
        turn_ends = [symbols.write([id]) for id in self.stop_token_ids]

        spellings = {ord(symbol): self.decode([id]) for id, symbol in symbols.of_ids.items()}
        return read_messages(
            "".join(texts),
            ChatPieces(**pieces),
            turn_ends,
            spell=lambda text: text.translate(spellings),
        )

    @property
    def opened_thought(self) -> str:
        """The end of the template's generation prompt that opens a thought.

        It is empty if the model opens its own thoughts.
        """
        if not self._wrapped.chat_template:
            return ""
        return self._pieces.opened_thought

    @property
    def end_of_turn_id(self) -> int:
        """The token with which a model ends its turn in the chat template."""
        first = self._added.split(self._pieces.after_model)[0]
        assert isinstance(first, int), (
            "the chat template was checked to close a model turn with a special token"
        )
        return first

    @functools.cached_property
    def _pieces(self) -> ChatPieces:
        """The chat template taken apart. Raises UserError where it cannot be used."""
        try:
            pieces = take_apart(self._render)
        except UserError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise UserError(
                f"{self._template_place} cannot be used ({one_line_reason(error)}): correct the "
                "chat template, or download it again"
            ) from error
        after_model = self._added.split(pieces.after_model)
        if not after_model or not isinstance(after_model[0], int):
            raise UserError(
                f"{self._template_place}: the chat template closes a model turn with "
                f"{pieces.after_model!r}, which does not begin with a special token: use a "
                "tokenizer whose turns end in one"
            )
        return pieces

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self._wrapped.chat_template:
            raise UserError(
                "the tokenizer has no chat template: use the checkpoint of a chat model, or add "
                "chat_template.jinja"
            )
        return self._wrapped.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, date_string=TEMPLATE_DATE
        )

    def _content(self, text: str) -> str:
        return text.strip() if self._pieces.strips_contents else text

    def _encode(self, parts: Sequence[int | str]) -> list[int]:
        """Encode text between token ids, which stay.

        All text between two ids is encoded at once, so that word boundaries fall as in the whole
        text.
        """
        ids: list[int] = []
        run = ""
        for part in [*parts, None]:
            if isinstance(part, str):
                run += part
                continue
            if run:
                ids += self.encode_trusted(run)
                run = ""
            if part is not None:
                ids.append(part)
        return ids


def _tag_texts(tags: Iterable[str]) -> list[str]:
    """Return <tag> and </tag> of each tag."""
    texts = []
    for tag in tags:
        texts += [f"<{tag}>", f"</{tag}>"]
    return texts


def _trained_backend(
    texts: Sequence[str], vocab_tokens: int, alphabet: Sequence[str]
) -> tokenizers.Tokenizer:
    """Train a vocabulary of at most `vocab_tokens` entries: all words, or a byte-level BPE."""
    split = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = dict.fromkeys(sorted(alphabet))
    for text in texts:
        for word, _ in split.pre_tokenize_str(text):
            words[word] = None

    has_room = len(words) <= vocab_tokens
    if has_room:
        vocabulary = {word: id for id, word in enumerate(words)}
        model = tokenizers.models.BPE(vocabulary, [], ignore_merges=True)
    else:
        model = tokenizers.models.BPE()
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = split
    backend.decoder = tokenizers.decoders.ByteLevel()

    if not has_room:
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_tokens, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    return backend


def _check_companions(folder: pathlib.Path) -> str:
    """Check the files beside the model's, and return the path of the chat template.

    Raises UserError.
    """
    for file in (folder / name for name in JSON_COMPANIONS):
        fields = read_json(file) if file.exists() else {}
        for name in sorted(SPECIAL_TOKENS & fields.keys()):
            token = fields[name]
            text = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(text, str):
                raise UserError(
                    f"{file} sets {name} to {token!r} and the text of a token is needed: download "
                    "it again"
                )

    templates = [
        folder / "chat_template.jinja",
        *sorted((folder / "additional_chat_templates").glob("*.jinja")),
    ]
    for file in templates:
        if file.exists():
            refuse_pointer(file)

    template_files = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    for name in template_files:
        if (folder / name).exists():
            return str(folder / name)
    return str(folder / template_files[-1])


def _damage(folder: pathlib.Path, error: Exception) -> str:
    """Return a sentence that names the damaged file of a tokenizer that cannot be loaded."""
    file = folder / "tokenizer.json"
    template = folder / "chat_template.jinja"
    try:
        if template.exists():
            template.read_text(encoding="utf-8")
    except (OSError, ValueError) as damage:
        return f"{template} cannot be read ({one_line_reason(damage)}): download it again"
    try:
        tokenizers.Tokenizer.from_file(str(file))
    except Exception as own_error:  # the package raises nothing more special
        error = own_error
    else:
        if (folder / "tokenizer_config.json").exists():
            file = folder / "tokenizer_config.json"
    return f"{file} cannot be used for this tokenizer ({one_line_reason(error)}): download it again"


def one_line_reason(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _TokenSymbols:
    """Writes token ids as symbols that no text holds, numbered in their order of appearance."""

    def __init__(self) -> None:
        self.of_ids: dict[int, str] = {}

    def write(self, parts: Iterable[int | str]) -> str:
        """Return the parts as one text, with a symbol for each id."""
        written = []
        for part in parts:
            if not isinstance(part, str):
                next_symbol = chr(FIRST_SURROGATE + len(self.of_ids))
                part = self.of_ids.setdefault(part, next_symbol)
            written.append(part)
        return "".join(written)


class _TokenSplitter:
    """Cuts text at its tokens: "a<t>b" becomes ["a", id of <t>, "b"]."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = dict(tokens)
        self.pattern: re.Pattern[str] | None = None
        if self.tokens:
            longest_first = sorted(self.tokens, key=len, reverse=True)
            self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def split(self, text: str) -> list[int | str]:
        if self.pattern is None:
            return [text]
        return [self.tokens.get(part, part) for part in self.pattern.split(text) if part]


def _bytes_of(token: str | None, *, is_byte_level: bool) -> bytes:
    """Return a vocabulary entry as bytes.

    Byte-level vocabularies write every byte as one printable character (GPT-2). Others write a
    space as U+2581 and bytes outside their alphabet as <0x0A>.
    """
    if token is None:  # a gap in the ids
        return b""
    byte_of_character = _byte_of_character()
    # An entry with another character stands for itself.
    if is_byte_level and all(character in byte_of_character for character in token):
        return bytes(byte_of_character[character] for character in token)
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table of the byte that each character stands for.

    Printable bytes stand for themselves. The others are the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(others):
        table[chr(256 + number)] = byte
    return table


def _without_added_tokens(
    backend: tokenizers.Tokenizer, added: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """Return a copy that knows no added token and adds none of its own accord."""
    description = json.loads(backend.to_str())
    description["added_tokens"] = []
    for name in ("post_processor", "truncation", "padding"):
        description[name] = None

    # Some tokenizers keep their special tokens in the model's vocabulary as well.
    vocabulary = description["model"].get("vocab")
    if isinstance(vocabulary, dict):
        description["model"]["vocab"] = {
            token: id for token, id in vocabulary.items() if token not in added
        }
    return tokenizers.Tokenizer.from_str(json.dumps(description))
