"""Upload a folder to the Hugging Face Hub as a model.

The token comes from HF_TOKEN, or from `hf auth login`.
"""

from pathlib import Path

from mujica_jax.errors import UserError
from mujica_jax.models.hub import EXAMPLE, HUB_NAME, http_error


def check_upload(name: str) -> None:
    """Check that a folder can be uploaded under this name, without asking the Hub.

    Raises UserError if the name is malformed, there is no token, or the Hub may not be asked.
    """
    import huggingface_hub
    from huggingface_hub import constants

    match = HUB_NAME.fullmatch(name)
    if match is None or match["revision"]:
        raise UserError(
            f"--push is {name!r}, which is not the name of a model at the Hugging Face Hub: write "
            f"OWNER/NAME, as in {EXAMPLE}"
        )
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"--push is {name}, but HF_HUB_OFFLINE is set: unset it, or leave --push out and "
            f"upload the folder later with `hf upload {name} DIR`"
        )
    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--push is {name}, but there is no token for {constants.ENDPOINT}: "
            "set HF_TOKEN to a token that may write, or run `hf auth login`"
        )


def upload_folder(folder: Path, name: str, *, private: bool) -> str:
    """Upload the files of a folder as a new commit, and return the address of the model.

    The model is made if it does not exist. `private` matters only for a new one. Raises UserError
    if the upload fails. The folder stays as it is.
    """
    import huggingface_hub
    from huggingface_hub import constants

    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export of mujica_jax")
    except (http_error(), OSError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise UserError(
            f"the upload to {name} failed ({constants.ENDPOINT}: {reason}): check "
            "the connection and that your token may write to this model, then run `hf upload "
            f"{name} {folder}`"
        ) from error
    return str(address)
