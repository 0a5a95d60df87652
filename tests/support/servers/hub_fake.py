"""A stand-in for the Hugging Face Hub: what its library calls to upload a folder; it can be told to
misbehave.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_" + "a1" * 17
# What the Hub knows of a card's header: some of its licenses, all relations, and the tasks of ours.
_LICENSES = {"apache-2.0", "mit", "llama3", "other"}
_RELATIONS = {"adapter", "finetune", "merge", "quantized"}
_TASKS = {"text-generation", "text-classification", "token-classification"}


class Fake:
    """Attributes may be changed at any time.

    Attributes:
        role: of the token.
        private: whether each repository is private, by its name.
        branches: contents of the files of each branch, by repository and branch.
        objects: large files that have come, by their SHA-256, committed or not.
        odd: by a pattern of the path, what is answered instead: a status, or None and the call
            hangs; or a function of this fake that is called first.
        calls: method and path of each call, in order.
        cards: that were to be validated.
    """

    def __init__(self):
        self.role = "write"
        self.private, self.branches, self.objects = {}, {}, {}
        self.odd, self.calls, self.cards = {}, [], []
        self.hung_up = threading.Event()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def files(self, repository, branch="main"):
        return self.branches[repository, branch]

    def close(self):
        self.hung_up.set()
        self.server.shutdown()
        self.server.server_close()


def wrong_in(header):
    """What the Hub would refuse in the header of a card; nothing if it is right."""
    known = {"license": _LICENSES, "base_model_relation": _RELATIONS, "pipeline_tag": _TASKS}
    given = [(name, values) for name, values in known.items() if name in header]
    return [header[name] for name, values in given if header[name] not in values]


class _Handler(BaseHTTPRequestHandler):
    fake: Fake

    def log_message(self, *args):
        """Say nothing."""

    def do_GET(self):
        self._answer("GET")

    def do_POST(self):
        self._answer("POST")

    def do_PUT(self):
        self._answer("PUT")

    def _answer(self, method):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        self.fake.calls.append((method, path))
        for pattern, odd in [*self.fake.odd.items()]:
            if re.search(pattern, path):
                if callable(odd):
                    odd(self.fake)
                    continue
                if odd is None:
                    self.fake.hung_up.wait(60)
                    return
                self._send(odd, {"error": f"the fake Hub says {odd}"})
                return
        if not path.startswith("/objects/") and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials"})
            return
        self._send(*self._called(method, path, body))

    def _chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _send(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _called(self, method, path, body):
        fake = self.fake
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "auth": {"accessToken": {"role": fake.role}}}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if path.startswith("/objects/"):
            digest = hashlib.sha256(body).hexdigest()
            assert path == f"/objects/{digest}"
            fake.objects[digest] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        words = path.removeprefix("/api/models/").split("/")
        repository, rest = "/".join(words[:2]), words[2:]
        if repository not in fake.private:
            return 404, {"error": "there is no such repository"}
        if not rest:
            return 200, {"id": repository, "private": fake.private[repository]}
        action, branch, *_ = rest
        return getattr(self, f"_{action}")(repository, branch, body)

    def _create(self, wanted):
        name = f"{wanted['organization'] or 'me'}/{wanted['name']}"
        status = 409 if name in self.fake.private else 200
        if status == 200:
            self.fake.private[name] = wanted.get("visibility") == "private"
            self.fake.branches[name, "main"] = {}
        return status, {"url": f"{self.fake.address}/{name}", "error": "it is there"}

    def _branch(self, repository, branch, body):
        there = (repository, branch) in self.fake.branches
        self.fake.branches.setdefault((repository, branch), {})
        return (409 if there else 200), {"error": "it is there"}

    def _revision(self, repository, branch, body):
        there = (repository, branch) in self.fake.branches
        return (200 if there else 404), {"id": repository, "error": "there is no such branch"}

    def _tree(self, repository, branch, body):
        files = self.fake.branches[repository, branch]
        return 200, [{"type": "file", "path": path, "size": 1, "oid": "0"} for path in files]

    def _preupload(self, repository, branch, body):
        answers = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith(".safetensors")
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        return 200, {"files": answers}

    def _batch(self, wanted):
        objects = []
        for each in wanted["objects"]:
            answer = dict(each)
            if each["oid"] not in self.fake.objects:
                place = {"href": f"{self.fake.address}/objects/{each['oid']}"}
                answer["actions"] = {"upload": place}
            objects.append(answer)
        return 200, {"transfer": "basic", "objects": objects}

    def _commit(self, repository, branch, body):
        files = self.fake.branches[repository, branch]
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.fake.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        return 200, {"commitUrl": f"{self.fake.address}/{repository}/commit/1", "commitOid": "1"}

    def _validate(self, card):
        self.fake.cards.append(card)
        wrong = wrong_in(yaml.safe_load(card.split("---")[1]))
        errors = [{"message": f"{value!r} is unknown"} for value in wrong]
        return (400 if wrong else 200), {"errors": errors, "warnings": []}
