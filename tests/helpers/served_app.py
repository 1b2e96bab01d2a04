"""An application behind a port of this machine, as `index serve` runs it."""

import contextlib
import threading
import time
from collections.abc import Iterator

from mujica_jax.retrieval.service import make_server, open_port


@contextlib.contextmanager
def app_served(app) -> Iterator[str]:
    """Serve the application and yield its address."""
    opened = open_port("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        opened.close()
