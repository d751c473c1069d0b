"""A second runner of `hf_static` version 1, written from docs/contract/hf-static-v1.md alone.

It needs numpy, torch and ExecuTorch's stock bindings and nothing of StaticLM. Comments name the
clauses. It speaks the kit's protocol:

    staticlm conformance make kit
    staticlm conformance run kit --runner "python examples/mini_runner.py"
"""

import base64
import json
import os
import sys

import numpy as np
import torch
from executorch.extension.pybindings import portable_lib

DTYPES = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16,
    "uint16": torch.uint16, "int32": torch.int32, "int64": torch.int64, "float16": torch.float16,
    "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
SCALAR_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32",
    7: "float64", 11: "bool", 15: "bfloat16", 27: "uint16",
}  # fmt: skip
FLOATS = ("float32", "float16", "bfloat16")
INPUTS = ("tokens", "start_position", "valid_length", "key_cache", "value_cache")
MISSING, INVALID = "contract-metadata-missing", "contract-metadata-invalid"
LAYOUT, SLOT, CACHE = "contract-layout-invalid", "contract-slot-mismatch", "contract-cache-invalid"


class Refusal(Exception):
    """A code of the document, and why."""

    def __init__(self, code, why, calls=()):
        super().__init__(why)
        self.code, self.calls = code, list(calls)


def must(condition, code, why):
    if not condition:
        raise Refusal(code, why)


def whole(value, low=0, high=2**31 - 1):
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def load(path):
    must(os.path.exists(path), "program-not-found", path)  # C0.1
    try:  # C0.2
        level = portable_lib.Verification.InternalConsistency
        module = portable_lib._load_for_executorch(path, program_verification=level)
        module.method_names()  # the file is read when it is first needed
        return module
    except RuntimeError as error:
        raise Refusal("program-malformed", str(error)) from None


def read(module):
    """The contract of a program: sections 1, 2, 3 and 5, then section 4 against the program."""
    names = set(module.method_names())

    def constant(name):
        return module.run_method(name, ()) if name in names else None

    label = constant("get_io_contract")
    must(label is not None, "contract-label-missing", "no label")
    good = isinstance(label[0], str) and 1 <= len(label[0]) <= 64
    good = good and all(32 <= ord(letter) <= 126 for letter in label[0])
    must(good, "contract-label-malformed", repr(label))
    must(label[0] == "hf_static", "contract-label-unknown", label[0])
    version = constant("get_io_contract_version")
    must(version and whole(version[0], 1), "contract-version-malformed", repr(version))
    must(version[0] == 1, "contract-version-unknown", version[0])
    facts = {}
    for key in ("get_max_context_len", "get_max_seq_len", "get_vocab_size"):
        value = constant(key)
        must(value is not None, MISSING, key)
        must(whole(value[0], 1), INVALID, key)
        facts[key] = value[0]
    for key, wanted in (("use_kv_cache", True), ("enable_dynamic_shape", False)):
        value = constant(key)
        must(value is not None, MISSING, key)
        must(value[0] is wanted, INVALID, key)  # C2.4
    capacity, longest, vocab = facts.values()
    must(longest <= capacity, INVALID, "get_max_seq_len")
    for key in ("get_bos_id", "get_eos_ids"):
        for token in constant(key) or ():
            must(whole(token, 0, vocab - 1), INVALID, key)  # C2.5
    text = constant("get_io_layout")
    must(text is not None, MISSING, "get_io_layout")
    try:
        methods, caches = parse(json.loads(text[0]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refusal(LAYOUT, f"get_io_layout: {error!r}") from None
    must(max(m["step"] for m in methods) == longest, INVALID, "get_max_seq_len")  # C2.3
    check_methods(methods, capacity)
    check_caches(caches, capacity, longest)
    for method in methods:
        check_slots(method, caches, vocab)
    for method in methods:
        must(method["name"] in names, "contract-method-missing", method["name"])  # C3.1
        check_program(method, module.method_meta(method["name"]))
    return {"methods": methods, "caches": caches, "capacity": capacity, "vocab": vocab}


def parse(body):
    """C2.6 and C3.4: types and ranges of the layout object."""
    methods, caches = body["methods"], body["caches"]
    slots = [s for m in methods for s in m["inputs"] + m["outputs"]]
    for method in methods:
        must(method["inputs"] and method["outputs"], LAYOUT, "slots")
        must(isinstance(method["name"], str) and method["name"], LAYOUT, "name")
        must(method["role"] in ("prefill", "decode", "verify"), LAYOUT, "role")
        must(method["logits_rows"] in ("last", "all"), LAYOUT, "logits_rows")
        must(whole(method["step"], 1), LAYOUT, "step")
        must(method.get("max_start") is None or whole(method["max_start"]), LAYOUT, "max_start")
    for cache in caches:
        must(cache["kind"] in ("full", "sliding"), LAYOUT, "kind")
        must(cache["part"] in ("key", "value") and whole(cache["layer"]), LAYOUT, "layer or part")
        must(cache.get("window") is None or whole(cache["window"], 1), LAYOUT, "window")
        must(isinstance(cache["layout"], str) and cache["layout"], LAYOUT, "layout")
    for entry in (*slots, *caches):
        must(
            entry["dtype"] in DTYPES and isinstance(entry["shape"], list), LAYOUT, "dtype or shape"
        )
        must(all(whole(size, 1) for size in entry["shape"]), LAYOUT, "shape")
    must(methods and caches, LAYOUT, "methods and caches")
    return methods, caches


def check_methods(methods, capacity):
    names = [m["name"] for m in methods]
    must(len(set(names)) == len(names), LAYOUT, "names")  # C3.2
    must({m["step"] for m in methods if m["role"] == "decode"} == {1}, LAYOUT, "decode")
    for role in ("prefill", "decode", "verify"):
        for step in {m["step"] for m in methods if m["role"] == role}:
            limits = [m.get("max_start") for m in methods if (m["role"], m["step"]) == (role, step)]
            good = limits.count(None) == 1 and len(set(limits)) == len(limits)
            must(good, LAYOUT, f"{role} of step {step}")  # C3.2, C3.3, C3.6
    for method in methods:
        must((method.get("max_start") or 0) < capacity, LAYOUT, "max_start")  # C3.6
        must(method["role"] != "verify" or method["logits_rows"] == "all", LAYOUT, "verify")  # C3.5


def check_caches(caches, capacity, longest):
    seen = {}
    for cache in caches:
        dims, window = cache["layout"].split(","), cache.get("window")
        must(cache["dtype"] in FLOATS, CACHE, "dtype")  # C5.1
        good = len(dims) == len(cache["shape"]) and dims.count("slots") == 1
        must(good, CACHE, "layout")  # C5.2
        slots = cache["shape"][dims.index("slots")]
        if cache["kind"] == "full":
            must(window is None and slots == capacity, CACHE, "full cache")  # C5.3
        else:
            must(window is not None, CACHE, "window")
            must(slots == min(capacity, window - 1 + longest), CACHE, "ring")  # C5.4
        must((cache["layer"], cache["part"]) not in seen, CACHE, "layer twice")  # C5.5
        seen[cache["layer"], cache["part"]] = (cache["kind"], window, slots)
    for (layer, part), places in seen.items():
        other = seen.get((layer, "value" if part == "key" else "key"), places)
        must(other == places, CACHE, "halves differ")


def check_slots(method, caches, vocab):
    step, ids = method["step"], list(range(len(caches)))
    for slots in (method["inputs"], method["outputs"]):
        must([s["index"] for s in slots] == list(range(len(slots))), LAYOUT, "indexes")  # C4.1
    roles = [s["role"] for s in method["inputs"]]
    must(set(roles) <= set(INPUTS), LAYOUT, "input roles")  # C4.2
    must({s["role"] for s in method["outputs"]} <= {"logits", "state"}, LAYOUT, "output roles")
    must(roles.count("tokens") == roles.count("start_position") == 1, LAYOUT, "roles")
    must(roles.count("valid_length") == (step > 1), LAYOUT, "valid_length")  # C4.4
    logits = [s for s in method["outputs"] if s["role"] == "logits"]
    must(len(logits) == 1, LAYOUT, "logits")
    shapes = {"tokens": [1, step], "start_position": [1], "valid_length": [1]}
    for slot in (*method["inputs"], *method["outputs"]):
        role, number = slot["role"], slot.get("cache")
        if role in shapes:
            must((slot["dtype"], slot["shape"]) == ("int64", shapes[role]), SLOT, role)  # C4.3
        if role in shapes or role == "logits":
            must(number is None, LAYOUT, f"{role} names a cache")
            continue
        must(number in ids and whole(number), LAYOUT, f"{role} names no cache")  # C4.6
        must(
            role in (f"{caches[number]['part']}_cache", "state"), LAYOUT, f"{role} of a wrong part"
        )
        same = all(slot[key] == caches[number][key] for key in ("dtype", "shape"))
        must(same, SLOT, f"{role} differs from its cache")
    bound = sorted(s["cache"] for s in method["inputs"] if s["role"] not in shapes)
    must(bound == ids, LAYOUT, "every cache once")
    rows = step if method["logits_rows"] == "all" else 1
    good = logits[0]["dtype"] in FLOATS and logits[0]["shape"] == [1, rows, vocab]
    must(good, SLOT, "logits")  # C4.5


def check_program(method, meta):
    """C4.7 and C4.8."""
    for slots, count, get in (
        (method["inputs"], meta.num_inputs(), meta.input_tensor_meta),
        (method["outputs"], meta.num_outputs(), meta.output_tensor_meta),
    ):
        must(len(slots) == count, SLOT, "number of slots")
        for slot in slots:
            info = get(slot["index"])
            found = (SCALAR_TYPES.get(info.dtype()), list(info.sizes()))
            must(found == (slot["dtype"], slot["shape"]), SLOT, f"{slot['role']} is {found}")
            cache = slot["role"] in ("key_cache", "value_cache")
            must(not (cache and info.is_memory_planned()), SLOT, "a cache is planned")


class Session:
    def __init__(self, path):
        self.module = load(path)
        self.contract = read(self.module)
        self.caches = [  # C9.1, C9.2
            torch.zeros(c["shape"], dtype=DTYPES[c["dtype"]]) for c in self.contract["caches"]
        ]
        self.position, self.broken = 0, False

    def plan(self, count):
        """C6.4 to C6.6: `(method, start, valid)`, the least step that holds the rest if any does."""
        usable = [m for m in self.contract["methods"] if m["role"] != "verify"]
        by_step = {m["step"]: m for m in usable if m.get("max_start") is None}  # C3.6: may ignore
        calls, at, end = [], self.position, self.position + count
        while at < end:
            fitting = sorted(s for s in by_step if at + s <= self.contract["capacity"])
            step = next((s for s in fitting if s >= end - at), fitting[-1])
            calls.append((by_step[step], at, min(step, end - at)))
            at += calls[-1][2]
        return calls

    def take(self, tokens, rows):
        must(not self.broken, "session-broken", "reset first")  # C10.2
        good = all(whole(token, 0, self.contract["vocab"] - 1) for token in tokens)
        must(tokens and good, "token-invalid", "tokens")  # C6.3
        end = self.position + len(tokens)
        must(end <= self.contract["capacity"], "capacity-exceeded", f"{end} tokens")  # C6.2
        made, found = [], []
        for method, start, valid in self.plan(len(tokens)):
            made.append([method["name"], start, valid])
            ids = tokens[start + len(tokens) - end :][:valid]
            found.append(self.call(method, start, ids, made))
            self.position = start + valid
        logits = np.concatenate(found) if rows == "all" else found[-1][-1:]
        return logits, made

    def call(self, method, start, ids, made):
        given = {
            "tokens": torch.tensor([ids + [0] * (method["step"] - len(ids))]),  # C7.1
            "start_position": torch.tensor([start]),
            "valid_length": torch.tensor([len(ids)]),
        }
        inputs = tuple(  # C4.9
            given[s["role"]] if s["role"] in given else self.caches[s["cache"]]
            for s in method["inputs"]
        )
        try:
            outputs = self.module.run_method(method["name"], inputs, False)
        except RuntimeError as error:
            self.broken = True  # C10.1
            raise Refusal("execution-failed", str(error), made) from None
        for slot in method["outputs"]:
            if slot["role"] == "state":  # C9.5
                cache, state = self.caches[slot["cache"]], outputs[slot["index"]]
                if state.data_ptr() != cache.data_ptr():
                    cache.copy_(state)
            else:
                logits = outputs[slot["index"]][0].float().numpy().copy()  # C9.3
        return logits[: len(ids)]  # C7.4

    def reset(self):
        for cache in self.caches:
            cache.zero_()
        self.position, self.broken = 0, False  # C10.3


def answer(request, sessions):
    op = request["op"]
    if op == "hello":
        return {"protocol": 1, "runner": "mini_runner"}
    if op == "open":
        number = max(sessions, default=0) + 1
        sessions[number] = one = Session(request["program"])
        facts = {"capacity": one.contract["capacity"], "vocab": one.contract["vocab"]}
        return {"session": number, "position": 0, "states": "copied where returned", **facts}
    if op == "close":
        del sessions[request["session"]]
        return {}
    one, reply = sessions[request["session"]], {}
    if op == "take":
        logits, calls = one.take(request["tokens"], request["rows"])
        reply = {"logits": base64.b64encode(logits.tobytes()).decode(), "calls": calls}
    elif op == "caches":
        raw = [cache.view(torch.uint8).numpy().tobytes() for cache in one.caches]
        data = [base64.b64encode(item).decode() for item in raw]
        places = [cache.data_ptr() for cache in one.caches]
        reply["caches"] = [{"data": d, "address": a} for d, a in zip(data, places, strict=True)]
    elif op == "reset":
        one.reset()
    return {"position": one.position, **reply}


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for a reply
    sessions = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            body = {"ok": True, **answer(request, sessions)}
        except Refusal as error:
            body = {"ok": False, "code": error.code, "message": str(error), "calls": error.calls}
        replies.write(json.dumps({"id": request["id"], **body}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
