"""Text to token ids and back, with a wall between what we write and what the world writes.

Three kinds of text, three encoders: the chat template's scaffold, whose special tokens count; a
model's own words, whose protocol tags count; and everything else, out of which no special or added
token can come, whatever it says. Conversations are rendered turn by turn from the pieces of the
chat template, so that token ids once made are never made again from text.
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
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
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
    """Untrusted text with the angle brackets of our protocol's tags replaced: `< Answer >` becomes
    `‹ Answer ›`."""
    return TAG_PATTERN.sub(r"‹\1›", text)


# GPT-2's words, except that a number in brackets is one word: a small model that names line [2]
# then copies a token that stands once in its context, where "[", "2" and "]" would each look like
# those of every other line.
WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\[-?\d{1,2}\]| ?\p{L}+| ?\p{N}+| ?\[| ?[^\s\p{L}\p{N}\[]+|\s+(?!\S)|\s+"""


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template."""

    def __init__(
        self,
        wrapped: Any,
        *,
        stop_token_ids: Sequence[int] = (),
        template_place: str = "the chat template",
    ) -> None:
        """`wrapped` is a transformers PreTrainedTokenizerFast. Without stop tokens given: its end
        of text and end of turn. `template_place` says where the chat template stands, for errors.
        """
        self._wrapped = wrapped
        self._template_place = template_place
        self._backend: tokenizers.Tokenizer = wrapped.backend_tokenizer
        added = {
            token.content: id for id, token in self._backend.get_added_tokens_decoder().items()
        }
        self._added_ids = frozenset(added.values())
        self._added = _TokenSplitter(added)
        tags = {f"<{slash}{tag}>" for tag in PROTOCOL_TAGS for slash in ("", "/")}
        self._tags = _TokenSplitter(
            {content: id for content, id in added.items() if content in tags}
        )
        self._plain = _without_added_tokens(self._backend, added)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        defaults = (
            (self.end_of_turn_id, wrapped.eos_token_id)
            if wrapped.chat_template
            else (wrapped.eos_token_id,)
        )
        stops = tuple(stop_token_ids) or tuple(
            dict.fromkeys(id for id in defaults if id is not None)
        )
        self.stop_token_ids: tuple[int, ...] = stops
        self.pad_token_id: int = next(
            id for id in (wrapped.pad_token_id, wrapped.eos_token_id, 0) if id is not None
        )

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Tokenizer":
        """From a Hugging Face directory with tokenizer.json; stop tokens are those of
        generation_config.json, if it has any."""
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
        except (
            Exception
        ) as error:  # transformers raises whatever its parsing of a damaged file meets
            raise UserError(_damage(folder, error)) from error

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and its companions; the stop tokens stand in the model's
        generation_config.json."""
        self._wrapped.save_pretrained(directory)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_tokens: int, tags: Sequence[str] = PROTOCOL_TAGS
    ) -> "Tokenizer":
        """Of at most `vocab_tokens` ids, special tokens and two tokens a tag (<tag>, </tag>)
        included.

        If there is room for every word of the texts, each is one token, and any other word is its
        bytes: what a small model has to copy then has no pieces that other words share. Otherwise a
        byte-level BPE."""
        from transformers import PreTrainedTokenizerFast

        special = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
        added = special + [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        if vocab_tokens < len(added) + len(alphabet):
            raise UserError(
                f"vocab_tokens is {vocab_tokens} but {len(alphabet)} bytes and {len(added)} "
                f"special tokens need {len(added) + len(alphabet)}: choose at least that many"
            )
        split = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        texts = list(texts)
        room = vocab_tokens - len(added)
        found = (word for text in texts for word, _ in split.pre_tokenize_str(text))
        words = dict.fromkeys([*sorted(alphabet), *found])
        if len(words) <= room:
            vocabulary = {word: id for id, word in enumerate(words)}
            backend = tokenizers.Tokenizer(
                tokenizers.models.BPE(vocabulary, [], ignore_merges=True)
            )
        else:
            backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer, backend.decoder = split, tokenizers.decoders.ByteLevel()
        if len(words) > room:
            trainer = tokenizers.trainers.BpeTrainer(
                vocab_size=room, initial_alphabet=alphabet, show_progress=False
            )
            backend.train_from_iterator(texts, trainer)
        backend.add_special_tokens(special)
        # Tags are added but not special: decoding must show them even where special tokens are
        # skipped.
        backend.add_tokens(
            [tokenizers.AddedToken(tag, normalized=False) for tag in added[len(special) :]]
        )
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=END_OF_TURN,
            pad_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,
        )
        wrapped.chat_template = CHATML_TEMPLATE
        return cls(wrapped)

    def encode_plain(self, text: str) -> list[int]:
        """Untrusted text: protocol tags are neutralised, and no special or added token comes
        out."""
        return self.encode_trusted(neutralise(text))

    def encode_trusted(self, text: str) -> list[int]:
        """Our own prose, such as a system prompt: tags stay readable as text; still no special or
        added token comes out."""
        ids = self._plain.encode(text, add_special_tokens=False).ids
        assert self._added_ids.isdisjoint(ids), (
            f"plain text was encoded to the added tokens {self._added_ids & set(ids)}"
        )
        return ids

    def encode_model(self, text: str) -> list[int]:
        """What a model would have written: protocol tags become their tokens where the vocabulary
        has such tokens."""
        return self._encode(self._tags.split(text))

    def encode_turn(self, text: str) -> list[int]:
        """Encode a model's whole turn. If the template opens its thought, the text goes on inside
        of the thought."""
        return self.encode_model(within_opened_thought(text) if self.opened_thought else text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens visible and no white space changed."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to a text, as bytes: a character may be spread over several
        tokens."""
        return self._bytes_of_tokens[id] if 0 <= id < len(self._bytes_of_tokens) else b""

    @functools.cached_property
    def _bytes_of_tokens(self) -> list[bytes]:
        tokens = (self._backend.id_to_token(id) for id in range(self.vocab_size))
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._backend.to_str())["decoder"])
        return [
            _bytes_of(token, byte_level and id not in self._added_ids)
            for id, token in enumerate(tokens)
        ]

    def open_conversation(
        self, system: str, user: str, examples: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """Return the ids from the first token to the generation prompt.

        `examples` are worked examples, (user message, model's reply) in their order. They stand
        between `system` and `user` as turns of the chat template. Where the template itself opens
        the thought of a turn, a reply does not open it again. `user` is untrusted; `system` and
        `examples` are ours."""
        if not examples:
            return self._open(system, user)
        ids = self._open(system, examples[0][0])
        # The messages of examples are ours, with the tags that we put into messages.
        following = [self._tags.split(self._content(message)) for message, _ in examples[1:]]
        following.append([self._content(neutralise(user))])
        for (_, reply), content in zip(examples, following, strict=True):
            ids += self.encode_turn(reply)
            ids += self._continue(content, stopped=False)
        return ids

    def _open(self, system: str, user: str) -> list[int]:
        """Return the ids of the system prompt, the first user message and the generation prompt."""
        pieces = self._pieces
        user = self._content(neutralise(user))
        if pieces.before_system is None:
            opening = [*self._added.split(pieces.before_user), f"{system}\n\n{user}"]
        else:
            head = [*self._added.split(pieces.before_system), self._content(system)]
            opening = [*head, *self._added.split(pieces.before_user), user]
        return self._encode([*opening, *self._added.split(pieces.before_model)])

    def continue_conversation(
        self, user: str, stopped: bool, *, tag: str | None = None
    ) -> list[int]:
        """Ids after a model turn: end of turn (unless the model `stopped` by writing it), user
        message, generation prompt.

        The message is untrusted. With `tag` it stands between that tag and its end, which are ours.
        """
        content: list[int | str] = [self._content(neutralise(user))]
        if tag is not None:
            content = [*self._tags.split(f"<{tag}>\n"), *content, *self._tags.split(f"\n</{tag}>")]
        return self._continue(content, stopped)

    def _continue(self, content: Sequence[int | str], stopped: bool) -> list[int]:
        after_model = self._added.split(self._pieces.after_model)
        scaffold = after_model[1:] if stopped else after_model
        return self._encode([*scaffold, *content, *self._added.split(self._pieces.before_model)])

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """The inverse of the two above: the messages of a conversation that ends where the model
        writes next, for a chat API.

        Contents are as the conversation holds them: of untrusted text that is what `neutralise`
        left."""
        symbols: dict[int, str] = {}

        def written(parts: Iterable[int | str]) -> str:
            """Added tokens as symbols, numbered as they come."""
            return "".join(
                part
                if isinstance(part, str)
                else symbols.setdefault(part, chr(FIRST_SURROGATE + len(symbols)))
                for part in parts
            )

        pieces: dict[str, Any] = {
            name: written(self._added.split(piece)) if isinstance(piece, str) else piece
            for name, piece in vars(self._pieces).items()
        }
        runs = itertools.groupby(ids, self._added_ids.__contains__)
        conversation = "".join(
            written(run) if added else self.decode(list(run)) for added, run in runs
        )
        turn_ends = [written([id]) for id in self.stop_token_ids]
        spelled = {ord(symbol): self.decode([id]) for id, symbol in symbols.items()}
        return read_messages(
            conversation,
            ChatPieces(**pieces),
            turn_ends,
            spell=lambda text: text.translate(spelled),
        )

    @property
    def opened_thought(self) -> str:
        """How the template's generation prompt opens a thought; empty where the model opens its
        own."""
        return self._pieces.opened_thought if self._wrapped.chat_template else ""

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
        try:
            pieces = take_apart(self._render)
        except UserError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise UserError(
                f"{self._template_place} cannot be used ({one_line_reason(error)}): correct the "
                "chat template, or download it again"
            ) from error
        first = self._added.split(pieces.after_model)[:1]
        if not first or not isinstance(first[0], int):
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
        """Token ids stay; text between two of them is encoded in one run, so that word boundaries
        fall as in the whole text."""
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


def _check_companions(folder: pathlib.Path) -> str:
    """Check the files that are read beside the model's, and return where the chat template stands.
    Raises UserError."""
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
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    place = next((folder / name for name in names if (folder / name).exists()), folder / names[-1])
    return str(place)


def _damage(folder: pathlib.Path, error: Exception) -> str:
    """Say which file of a tokenizer that cannot be loaded is to blame."""
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
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__


class _TokenSplitter:
    """Cuts text at the given tokens: "a<t>b" becomes ["a", id of <t>, "b"]."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = dict(tokens)
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self.pattern = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self.tokens else None
        )

    def split(self, text: str) -> list[int | str]:
        if self.pattern is None:
            return [text]
        return [self.tokens.get(part, part) for part in self.pattern.split(text) if part]


def _bytes_of(token: str | None, byte_level: bool) -> bytes:
    """A vocabulary entry as bytes. Byte-level vocabularies write every byte as one printable
    character (GPT-2), others write a space as U+2581 and bytes outside their alphabet as <0x0A>."""
    if token is None:  # a gap in the ids
        return b""
    if byte_level and all(
        character in _byte_of_character() for character in token
    ):  # a stray entry stands for itself
        return bytes(_byte_of_character()[character] for character in token)
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from
    U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def _without_added_tokens(
    backend: tokenizers.Tokenizer, added: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """A copy that knows no added token and adds none of its own accord."""
    description = json.loads(backend.to_str())
    description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    vocabulary = description["model"].get("vocab")
    if isinstance(
        vocabulary, dict
    ):  # some tokenizers keep their special tokens in the model's vocabulary as well
        description["model"]["vocab"] = {
            token: id for token, id in vocabulary.items() if token not in added
        }
    return tokenizers.Tokenizer.from_str(json.dumps(description))
