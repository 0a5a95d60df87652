"""A stand-in for a vLLM server: its endpoints, its labels, made-up completions; it can be told to
misbehave.
"""

import contextlib
import copy
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

CONFIG = {
    "model_config": {
        "dtype": "torch.float32",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 64,
        "quantization": None,
    },
    "weight_transfer_config": {"backend": "burnish_files"},
    "lora_config": None,
}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, address):
        """Say nothing: clients hang up on what takes too long."""

    # of 5, some of a dozen connections at once wait a second for the kernel's next attempt
    request_queue_size = 128


class Fake:
    """Attributes may be changed at any time.

    Attributes:
        odd: by path, what is answered instead: a function of the body that gives (status, JSON or
            text), or (None, seconds to hang), or (None, a function of the connection that writes
            what it likes to it).
        key: that each request must bring, as vLLM wants it; None takes all.
        calls: paths and bodies of the POST requests that came, in order, but for completions and
            tokenization.
        paths: that the server says it has.
        connections, open: that came so far, and of these not closed yet.
        rated: log-probs of the vocabulary in the place of each token but the first, a function of
            the tokens of a prompt.
        max_logprobs: of the vocabulary that it gives at most.
    """

    def __init__(self, tokenizer, port=0, host="127.0.0.1"):
        self.tokenizer = tokenizer
        self.vocab = len(tokenizer)
        self.config = copy.deepcopy(CONFIG)
        self.version, self.root = "0.32.0", "/no/such/model"
        self.label, self.adapters = "default", []
        self.paths = {"/v1/load_lora_adapter": {}}
        self.odd, self.calls = {}, []
        self.key = None
        self.connections = self.open = 0
        self.rated, self.max_logprobs = None, 20
        self.active = self.paused = False
        self.hung_up = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("Server", (_Server,), {"address_family": family})
        self.server = kind((host, port), type("Handler", (_Handler,), {"fake": self}))
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method, path, body):
        """(status, JSON)"""
        if method == "POST" and path not in ("/inference/v1/generate", "/tokenize"):
            self.calls.append((path, body))
        if path in self.odd:
            return self.odd[path](body)
        handler = getattr(self, "do" + path.replace("/", "_"), None)
        return (404, {"detail": "Not Found"}) if handler is None else handler(body)

    def do_health(self, body):
        return 200, ""

    def do_version(self, body):
        return 200, {"version": self.version}

    def do_server_info(self, body):
        return 200, {"vllm_config": self.config}

    def do_openapi_json(self, body):
        return 200, {"paths": self.paths}

    def do_weight_info(self, body):
        return 200, {"weight_version": self.label}

    def do_get_world_size(self, body):
        return 200, {"world_size": 2}

    def do_v1_models(self, body):
        return 200, {
            "data": [{"id": name, "root": self.root} for name in (self.root, *self.adapters)]
        }

    def do_tokenize(self, body):
        return 200, {
            "tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        }

    def do_is_paused(self, body):
        return 200, {"is_paused": self.paused}

    def do_pause(self, body):
        self.paused = True
        return 200, {}

    def do_resume(self, body):
        assert not self.active, "a forward pass on weights that are half there kills the engine"
        self.paused = False
        return 200, {}

    def do_update_weights(self, body):
        return 200, {}

    do_init_weight_transfer_engine = do_shutdown_weight_transfer_engine = do_update_weights

    def do_update_weight_version(self, body):
        self.label = body["new_version"]
        return 200, {}

    def do_start_weight_update(self, body):
        if self.active:
            return error(500, "start_weight_update called while a weight update is already active")
        self.active = True
        return 200, {}

    def do_finish_weight_update(self, body):
        if not self.active:
            return error(500, "finish_weight_update called without a matching start_weight_update")
        self.active, self.label = False, body.get("weight_version", self.label)
        return 200, {}

    def do_v1_load_lora_adapter(self, body):
        self.adapters.append(body["lora_name"])
        return 200, "loaded"

    def do_v1_unload_lora_adapter(self, body):
        self.adapters.remove(body["lora_name"])
        return 200, "unloaded"

    def do_v1_completions(self, body):
        tokens, count = body["prompt"], body["prompt_logprobs"]
        if count > self.max_logprobs:
            return error(
                400,
                f"Requested prompt logprobs of {count}, which is greater than max allowed: {self.max_logprobs}",
            )
        if max(tokens) >= self.vocab:
            return error(400, f"Token id {max(tokens)} is out of vocabulary")
        places = [None]
        for token, logprobs in zip(tokens[1:], self.rated(tokens), strict=True):
            ranked = sorted(range(len(logprobs)), key=lambda each: -logprobs[each])
            chosen = [token, *ranked[:count]]
            places.append(
                {
                    str(each): {"logprob": logprobs[each], "rank": ranked.index(each) + 1}
                    for each in chosen
                }
            )
        return 200, {"choices": [{"text": "", "prompt_logprobs": places}]}

    def do_inference_v1_generate(self, body):
        if max(body["token_ids"]) >= self.vocab:
            return error(400, f"Token id {max(body['token_ids'])} is out of vocabulary")
        how = body["sampling_params"]
        drawn = [(how.get("seed", 0) + t) % self.vocab for t in range(how["max_tokens"])]
        stops = how.get("stop_token_ids", ())
        tokens = [10 if token in stops else token for token in drawn]  # it never ends by itself
        return 200, {"choices": [choice(tokens, self.label)]}


def choice(tokens, label, **changes):
    content = [{"token_id": token, "logprob": -1.0} for token in tokens]
    labels = [{"version": label, "start": 0, "end": len(tokens)}]
    usual = {
        "token_ids": tokens,
        "logprobs": {"content": content},
        "weight_versions": labels,
        "finish_reason": "length",
    }
    return {**usual, **changes}


def error(status, message):
    return status, {"error": {"message": message, "type": "Error", "code": status}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections, as vLLM does

    def setup(self):
        super().setup()
        self.fake.connections += 1
        self.fake.open += 1

    def finish(self):
        super().finish()
        self.fake.open -= 1

    def do_GET(self):
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        path = urlsplit(self.path).path.replace(".", "_")
        key = self.fake.key
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            status, answer = error(401, "Unauthorized")
        else:
            status, answer = self.fake.answer(self.command, path, body)
        if status is None and callable(answer):
            self.close_connection = True
            with contextlib.suppress(OSError):  # the client may hang up before all is written
                answer(self.connection)
            return
        if status is None:  # hang until the client hangs up
            self.close_connection = True
            self.connection.settimeout(answer)
            try:
                if self.connection.recv(1) == b"":
                    self.fake.hung_up.set()
            except TimeoutError:
                pass
            return
        text = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, *arguments):
        pass
