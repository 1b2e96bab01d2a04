"""Write a policy of a run into a folder that others can use, with a model card.

    python -m mujica_jax.export RUN --to DIR [--policy N] [--adapter | --merge] [--licence NAME]
    python -m mujica_jax.export RUN --to DIR --push OWNER/NAME [--private]

A run that trains all weights exports the model. A run that trains LoRA adapters exports the
adapter, in the form of PEFT. With `--merge` it exports the model with the adapter merged into its
weights.

DIR has the safetensors files, the configuration, the tokenizer with its chat template, and
README.md, the model card. The card says how the policy was trained and how it scored. `--push`
uploads DIR to the Hugging Face Hub.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mujica_jax.config.program_help import program_name
from mujica_jax.errors import UserError
from mujica_jax.models.hub_upload import check_upload, upload_folder
from mujica_jax.runs.export import Form, find_export, write_export


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    - 0: the policy is exported, and uploaded if that was asked for.
    - 2: the user made a mistake, or the upload failed.
    - 130: Ctrl-C ended the program.
    """
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        export(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def export(options: argparse.Namespace) -> None:
    """Write the folder, and upload it if `--push` names a model at the Hub."""
    form: Form | None = None
    if options.adapter:
        form = "adapter"
    elif options.merge:
        form = "merged model"
    if "://" in options.to:
        raise UserError(f"--to is {options.to}, but an export is a local folder: give one")
    # Check everything about the upload first, because writing a large model takes minutes.
    if options.push is not None:
        check_upload(options.push)
    elif options.private:
        raise UserError(
            "--private is given without --push: add --push OWNER/NAME, or leave --private out"
        )

    policy = find_export(options.run, policy=options.policy, form=form)
    folder = Path(os.path.abspath(options.to))
    write_export(policy, folder, name=options.push or folder.name, licence=options.licence)
    print(f"wrote the {policy.form} of {policy.run}, policy {policy.version}, into {folder}")
    if options.push is not None:
        address = upload_folder(folder, options.push, private=options.private)
        print(f"uploaded it to {address}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=program_name("export"),
        description="Write a policy of a run into a folder that others can use, with a model card.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, local or gs://BUCKET/PREFIX")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--policy",
        type=int,
        metavar="N",
        help="number of the policy: 0 after the warm-up, N after round N (default: the latest)",
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--adapter",
        action="store_true",
        help="write the LoRA adapter in the form of PEFT (the default if the run trains adapters)",
    )
    forms.add_argument(
        "--merge",
        action="store_true",
        help="write the whole model with the LoRA adapter merged into its weights",
    )
    parser.add_argument(
        "--licence",
        metavar="NAME",
        help="licence for the model card, such as apache-2.0 (default: that of the base model)",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload the folder to this model of the Hub"
    )
    parser.add_argument(
        "--private", action="store_true", help="with --push: make a new model private"
    )
    return parser
