"""Convert text to token ids and back, and keep special tokens out of untrusted text.

Each kind of text has its own encoder:

    text of the chat template       special tokens in it become tokens
    text that a model wrote         protocol tags in it, such as <search>, become tokens
    all other text                  never becomes a special or added token, whatever it says

Conversations are rendered turn by turn from the pieces of the chat template (`chat_template`). So a
conversation grows by appending token ids, and no text is ever encoded twice.
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
from mujica_jax.models.chat_template import (
    FIRST_SURROGATE,
    ChatPieces,
    read_messages,
    scaffold_between,
    take_apart,
)
from mujica_jax.models.companions import read_json, refuse_pointer, stop_tokens
from mujica_jax.models.thoughts import within_opened_thought
from mujica_jax.records import Message

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
# The date that is passed to chat templates. Llama-3.1's template would otherwise print the current
# date, and a run would give other results on another day.
TEMPLATE_DATE = "26 Jul 2024"
# Tags whose angle brackets are replaced in text from outside (`neutralise`). The last three are
# tags of agents, but the vocabulary has no tokens for them.
UNTRUSTED_TAGS = (*PROTOCOL_TAGS, "reflect", "question", "recall")
TAG_PATTERN = re.compile(rf"<(\s*/?\s*(?:{'|'.join(UNTRUSTED_TAGS)})\s*/?\s*)>", re.IGNORECASE)
# Files that transformers reads if they are in the folder. Each of them holds a JSON object.
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


# GPT-2's rule for cutting text into words, with one addition: a number in brackets, such as [2], is
# one word. A small model then names a numbered line by copying one token that occurs once in its
# context. As three tokens, "[", "2" and "]", the numbers of all lines would look alike.
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
        """Wrap a PreTrainedTokenizerFast of transformers.

        Without `stop_token_ids`, the stop tokens are its end of turn and its end of text.
        `template_place` is the file of the chat template, for error messages. Raises UserError if
        the chat template cannot be used.
        """
        self._wrapped = wrapped
        self._template_place = template_place
        self._backend: tokenizers.Tokenizer = wrapped.backend_tokenizer

        # The three encoders: one produces all added tokens, one only protocol tags, one no added
        # token.
        added_tokens = self._backend.get_added_tokens_decoder().items()
        added = {token.content: id for id, token in added_tokens}
        self._added_ids = frozenset(added.values())
        self._added = _TokenSplitter(added)
        tags = set(_tag_texts(PROTOCOL_TAGS))
        tag_ids = {content: id for content, id in added.items() if content in tags}
        self._tags = _TokenSplitter(tag_ids)
        self._plain = _without_added_tokens(self._backend, added)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        # The scaffold around messages of these roles, as `scaffold_between` returns it.
        self._scaffolds: dict[tuple[bool, tuple[str, ...]], list[str] | None] = {}

        # Do this even if `stop_token_ids` are passed: `end_of_turn_id` checks the chat template.
        end_ids = [self.end_of_turn_id] if wrapped.chat_template else []
        end_ids.append(wrapped.eos_token_id)
        default_stops = dict.fromkeys(id for id in end_ids if id is not None)
        self.stop_token_ids: tuple[int, ...] = tuple(stop_token_ids) or tuple(default_stops)
        pad_ids = (wrapped.pad_token_id, wrapped.eos_token_id, 0)
        self.pad_token_id: int = next(id for id in pad_ids if id is not None)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the package `tokenizers`, for programs that only decode."""
        return self._backend

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face directory, from its tokenizer.json.

        The stop tokens come from generation_config.json, if it names any. Raises UserError if a
        file is missing or damaged.
        """
        from transformers import PreTrainedTokenizerFast

        folder = pathlib.Path(directory)
        if not (folder / "tokenizer.json").exists():
            raise UserError(
                f"{folder} has no tokenizer.json: choose the directory of a checkpoint with a fast "
                "tokenizer, for example RUN/policies/N/model of a run"
            )
        stops = stop_tokens(folder)
        template_place = _check_companions(folder)
        try:
            wrapped = PreTrainedTokenizerFast.from_pretrained(folder)
            return cls(wrapped, stop_token_ids=stops, template_place=template_place)
        except UserError:
            raise
        # For a damaged file transformers may raise any exception.
        except Exception as error:
            raise UserError(_damage(folder, error)) from error

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and the files that belong to it.

        The stop tokens are not written. They are in the generation_config.json of the model.
        """
        self._wrapped.save_pretrained(directory)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_tokens: int, tags: Sequence[str] = PROTOCOL_TAGS
    ) -> "Tokenizer":
        """Train a tokenizer with at most `vocab_tokens` token ids.

        The ids include three special tokens and two tokens for each tag (<tag>, </tag>).

        If there are enough ids for all words of `texts`, each of these words is one token. Any
        other word is spelled in bytes. A word that a small model has to copy then shares no tokens
        with other words. If there are not enough ids, the tokenizer is a byte-level BPE.

        Raises UserError if the ids are not enough for the special tokens and all bytes.
        """
        from transformers import PreTrainedTokenizerFast

        special = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
        tag_texts = _tag_texts(tags)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        added_count = len(special) + len(tag_texts)
        if vocab_tokens < added_count + len(alphabet):
            raise UserError(
                f"vocab_tokens is {vocab_tokens}, but {len(alphabet)} bytes and {added_count} "
                f"special tokens need {added_count + len(alphabet)}: set vocab_tokens to at least "
                f"{added_count + len(alphabet)}"
            )

        backend = _trained_backend(list(texts), vocab_tokens - added_count, alphabet)
        backend.add_special_tokens(special)
        # Tags are added tokens but not special ones, so that decoding shows them even if it skips
        # special tokens.
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
        """Return the token ids of untrusted text.

        Protocol tags are neutralised. The ids include no special or added token.
        """
        return self.encode_trusted(neutralise(text))

    def encode_trusted(self, text: str) -> list[int]:
        """Return the token ids of our own prose, such as a system prompt.

        Tags stay as they are, as ordinary text. The ids include no special or added token.
        """
        ids = self._plain.encode(text, add_special_tokens=False).ids
        assert self._added_ids.isdisjoint(ids), (
            f"plain text was encoded to the added tokens {self._added_ids & set(ids)}"
        )
        return ids

    def encode_model(self, text: str) -> list[int]:
        """Return the token ids of text as a model would have written it.

        A protocol tag becomes its token if the vocabulary has one.
        """
        return self._encode(self._tags.split(text))

    def encode_turn(self, text: str) -> list[int]:
        """Return the token ids of a model's whole turn.

        If the template opens the thought of the turn, the ids continue inside of this thought.
        """
        if self.opened_thought:
            text = within_opened_thought(text)
        return self.encode_model(text)

    def is_spelling(self, ids: Sequence[int], text: str) -> bool:
        """Return whether these tokens are a way to write a text of a model.

        Special tokens never are, even if the text has their names. Tags of our protocol may be.
        """
        forbidden_ids = self._added_ids - set(self._tags.tokens.values())
        is_known = all(0 <= id < self.vocab_size for id in ids)
        return is_known and forbidden_ids.isdisjoint(ids) and self.decode(ids) == text

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens visible and white space unchanged."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that one token adds to a text.

        They may be a part of a character, because several tokens may spell one character.
        """
        if 0 <= id < len(self._bytes_of_tokens):
            return self._bytes_of_tokens[id]
        return b""

    @functools.cached_property
    def _bytes_of_tokens(self) -> list[bytes]:
        """The bytes of each token, in the order of the ids."""
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
        """Return the token ids from the first token to the end of the generation prompt.

        `system` is the system prompt and `user` the first user message. `examples` are worked
        examples, each a pair of a user message and the model's reply. They become turns of the
        conversation between `system` and `user`. If the template itself opens the thought of a
        turn, a reply does not open it again. `user` is untrusted, and is neutralised. `system` and
        `examples` are our own text.
        """
        if not examples:
            return self._open(system, user)

        # The messages of examples are our own text, so their tags become tokens.
        first_message, _ = examples[0]
        ids = self._open(system, first_message)
        next_contents = [self._tags.split(self._content(message)) for message, _ in examples[1:]]
        next_contents.append([self._content(neutralise(user))])

        for (_, reply), next_content in zip(examples, next_contents, strict=True):
            ids += self.encode_turn(reply)
            ids += self._continue(next_content, stopped=False)
        return ids

    def _open(self, system: str, user: str) -> list[int]:
        """Return the ids of the system prompt, a first user message and the generation prompt."""
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
        """Return the ids that follow a model's turn, up to the next generation prompt.

        These are the end of the turn, the user message and the generation prompt. If the model
        `stopped`, it has written the end of the turn itself, and the result begins after it. `user`
        is untrusted, and is neutralised. With `tag` the message is put between <tag> and </tag>,
        which become tokens.
        """
        return self._continue(self._untrusted(user, tag or ""), stopped)

    def _continue(self, content: Sequence[int | str], stopped: bool) -> list[int]:
        """Return the ids after a model's turn. `content` has the parts of the next user message."""
        after_model = self._added.split(self._pieces.after_model)
        if stopped:
            after_model = after_model[1:]
        before_model = self._added.split(self._pieces.before_model)
        return self._encode([*after_model, *content, *before_model])

    def open_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the messages before the model's first turn.

        The ids begin with the first token and end with the generation prompt. They may begin with a
        system prompt that the chat template adds. For a system prompt and one user message they are
        the ids of `open_conversation`.

        A system prompt is written without special tokens. Messages of users and tools are untrusted,
        and are neutralised. If the template has no role for a system prompt, it stands at the
        beginning of the next message. If the template has no role for tools, their messages are
        written as a user's. Raises UserError if the template cannot write these messages.
        """
        return self._encode(self._parts_of(messages, opens=True))

    def continue_messages(self, messages: Sequence[Message], stopped: bool) -> list[int]:
        """Return the ids that follow a model's turn, up to the next generation prompt.

        For one user message they are the ids of `continue_conversation`, and `stopped` has the same
        meaning. See `open_messages`.
        """
        parts = self._parts_of(messages, opens=False)
        return self._encode(parts[1:] if stopped else parts)

    def _parts_of(self, messages: Sequence[Message], *, opens: bool) -> list[int | str]:
        """Return messages with the scaffold around them, up to the next generation prompt."""
        roles = [message.role for message in messages]
        contents: list[list[int | str]] = []
        for message in messages:
            is_system = message.role == "system"
            content = self._content(message.content)
            contents.append([content] if is_system else self._untrusted(content, message.tag))

        scaffold = self._scaffold(roles, opens=opens)
        if scaffold is None:
            roles = ["user" if role == "tool" else role for role in roles]
            scaffold = self._scaffold(roles, opens=opens)
        if scaffold is None and opens and roles[0] == "system" and len(roles) > 1:
            scaffold = self._scaffold(roles[1:], opens=opens)
            first_content = [f"{messages[0].content}\n\n", *contents[1]]
            contents = [first_content, *contents[2:]]
        if scaffold is None:
            place = "at the beginning" if opens else "after a turn of the assistant"
            raise UserError(
                f"the chat template in {self._template_place} cannot write the messages "
                f"{', '.join(roles)} {place}: merge or leave out messages, or use the template of "
                "another checkpoint"
            )

        parts = self._added.split(scaffold[0])
        if not opens and parts[:1] != [self.end_of_turn_id]:
            raise UserError(
                f"the chat template in {self._template_place} closes a turn of the assistant with "
                f"{scaffold[0]!r} before a message of {roles[0]}, and in another way before a "
                "user's: use the template of another checkpoint"
            )
        for content, piece in zip(contents, scaffold[1:], strict=True):
            parts += [*content, *self._added.split(piece)]
        return parts

    def _scaffold(self, roles: Sequence[str], *, opens: bool) -> list[str] | None:
        """Return the scaffold around messages of these roles. See `scaffold_between`."""
        key = (opens, tuple(roles))
        if key not in self._scaffolds:
            self._scaffolds[key] = scaffold_between(self._render, roles, opens=opens)
        return self._scaffolds[key]

    def _untrusted(self, text: str, tag: str) -> list[int | str]:
        """Return the parts of an untrusted message, between <tag> and </tag> if there is a tag."""
        content: list[int | str] = [self._content(neutralise(text))]
        if not tag:
            return content
        return [*self._tags.split(f"<{tag}>\n"), *content, *self._tags.split(f"\n</{tag}>")]

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """Return the messages of a conversation, for a chat API.

        The conversation must end with a generation prompt. This is the inverse of
        `open_conversation` and `continue_conversation`, except that untrusted text stays
        neutralised. Raises UserError if the ids are no such conversation.
        """
        symbols = _TokenSymbols()
        pieces: dict[str, Any] = {}
        for name, piece in vars(self._pieces).items():
            is_text = isinstance(piece, str)
            pieces[name] = symbols.write(self._added.split(piece)) if is_text else piece

        # Write the conversation as text, with one symbol for each added token.
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
        """The end of the generation prompt that opens a thought.

        It is empty if the template opens no thought.
        """
        if not self._wrapped.chat_template:
            return ""
        return self._pieces.opened_thought

    @property
    def end_of_turn_id(self) -> int:
        """The id of the token that ends a model's turn in the chat template."""
        first = self._added.split(self._pieces.after_model)[0]
        assert isinstance(first, int), (
            "`_pieces` has to check that a special token closes a model's turn"
        )
        return first

    @functools.cached_property
    def _pieces(self) -> ChatPieces:
        """The pieces of the chat template. Raises UserError if it cannot be used."""
        try:
            pieces = take_apart(self._render)
        except UserError:
            raise
        # A template is a program, so it may raise any exception.
        except Exception as error:
            raise UserError(
                f"{self._template_place} cannot be used ({one_line_reason(error)}): correct the "
                "chat template, or download it again"
            ) from error
        after_model = self._added.split(pieces.after_model)
        if not after_model or not isinstance(after_model[0], int):
            raise UserError(
                f"{self._template_place}: the chat template closes a model turn with "
                f"{pieces.after_model!r}, which does not begin with a special token: use a "
                "tokenizer whose turns end with a special token"
            )
        return pieces

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the messages as the chat template writes them, with a generation prompt.

        Raises UserError if the tokenizer has no chat template.
        """
        if not self._wrapped.chat_template:
            raise UserError(
                "the tokenizer has no chat template: use the checkpoint of a chat model, or add "
                "chat_template.jinja"
            )
        return self._wrapped.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, date_string=TEMPLATE_DATE
        )

    def _content(self, text: str) -> str:
        """Return the content of a message, stripped if the chat template strips contents."""
        return text.strip() if self._pieces.strips_contents else text

    def _encode(self, parts: Sequence[int | str]) -> list[int]:
        """Return the parts as token ids. Parts that are ids stay as they are.

        All text between two ids is encoded at once, so that words that span two parts are not cut.
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
    """Return the two texts <tag> and </tag> for each tag."""
    texts = []
    for tag in tags:
        texts += [f"<{tag}>", f"</{tag}>"]
    return texts


def _trained_backend(
    texts: Sequence[str], vocab_tokens: int, alphabet: Sequence[str]
) -> tokenizers.Tokenizer:
    """Return a tokenizer with at most `vocab_tokens` entries, as `Tokenizer.train` explains.

    `alphabet` has the characters that stand for the 256 bytes.
    """
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
    """Check the files of a tokenizer, and return the path of the file with its chat template.

    Raises UserError that names a damaged file.
    """
    for file in (folder / name for name in JSON_COMPANIONS):
        fields = read_json(file) if file.exists() else {}
        for name in sorted(SPECIAL_TOKENS & fields.keys()):
            token = fields[name]
            text = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(text, str):
                raise UserError(
                    f"{file} sets {name} to {token!r}, which must be the text of a token: download "
                    "the file again"
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
    """Return an error message for a tokenizer that cannot be loaded, with the damaged file.

    `error` is the exception that transformers raised.
    """
    file = folder / "tokenizer.json"
    template = folder / "chat_template.jinja"
    try:
        if template.exists():
            template.read_text(encoding="utf-8")
    except (OSError, ValueError) as damage:
        return f"{template} cannot be read ({one_line_reason(damage)}): download it again"
    try:
        tokenizers.Tokenizer.from_file(str(file))
    # The package raises plain Exceptions.
    except Exception as own_error:
        error = own_error
    else:
        if (folder / "tokenizer_config.json").exists():
            file = folder / "tokenizer_config.json"
    return f"{file} cannot be used for this tokenizer ({one_line_reason(error)}): download it again"


def one_line_reason(error: Exception) -> str:
    """Return the first line of an exception's text, or the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _TokenSymbols:
    """A mapping of token ids to symbols, which are surrogate characters that no text holds.

    The symbols are numbered in the order in which their ids first appear.
    """

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
    """A splitter that cuts text at tokens: "a<t>b" becomes ["a", id of <t>, "b"]."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = dict(tokens)
        self.pattern: re.Pattern[str] | None = None
        if self.tokens:
            longest_first = sorted(self.tokens, key=len, reverse=True)
            self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def split(self, text: str) -> list[int | str]:
        """Return the parts of a text: ids of tokens, and the text between them."""
        if self.pattern is None:
            return [text]
        return [self.tokens.get(part, part) for part in self.pattern.split(text) if part]


def _bytes_of(token: str | None, *, is_byte_level: bool) -> bytes:
    """Return the bytes that an entry of the vocabulary stands for.

    A byte-level vocabulary writes every byte as one printable character, as GPT-2 does. Other
    vocabularies write a space as U+2581 and a byte that has no character as <0x0A>. `token` is None
    for an id without an entry.
    """
    if token is None:
        return b""
    byte_of_character = _byte_of_character()
    # In a byte-level vocabulary, an entry with any other character is ordinary text.
    if is_byte_level and all(character in byte_of_character for character in token):
        return bytes(byte_of_character[character] for character in token)
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character stands for in GPT-2's byte-level vocabulary.

    A printable character stands for its own byte. The characters from U+0100 on stand for the
    other bytes, in rising order.
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
    """Return a copy of a tokenizer that never produces an added token.

    `added` maps the texts of all added tokens to their ids.
    """
    description = json.loads(backend.to_str())
    description["added_tokens"] = []
    for name in ("post_processor", "truncation", "padding"):
        description[name] = None

    # Some tokenizers also have their special tokens in the vocabulary of the model. Remove them.
    vocabulary = description["model"].get("vocab")
    if isinstance(vocabulary, dict):
        description["model"]["vocab"] = {
            token: id for token, id in vocabulary.items() if token not in added
        }
    return tokenizers.Tokenizer.from_str(json.dumps(description))
