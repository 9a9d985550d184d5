# What a PyTorch program sees of a share of a card, a JSON line for each step.
#
#   share.py info | memory | allocator SECONDS | graphs | load SECONDS | nvml
#
# Run by the bundle's runner, under carve's library and without it.
import json
import random
import sys
import time


def say(step, **fields):
    print(json.dumps({"step": step, "ok": True, **fields}), flush=True)


def info(torch):
    free, total = torch.cuda.mem_get_info()
    p = torch.cuda.get_device_properties(0)
    say("info", torch=torch.__version__, cuda=str(torch.version.cuda), name=p.name, propertiesBytes=p.total_memory,
        totalBytes=total, freeBytes=free, devices=torch.cuda.device_count())


def memory(torch):
    """Up to the share and over it."""
    piece = 64 << 20
    torch.zeros(1, device="cuda")
    first, total = torch.cuda.mem_get_info()
    held, message, kind = [], "", ""
    try:
        while len(held) < 16384:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError as e:
        message, kind = str(e).split("\n")[0], type(e).__name__
    had = len(held) * piece
    left, _ = torch.cuda.mem_get_info()
    # The program goes on: what it has is good, and what it gives back can be had again.
    del held[1:]
    good = bool(held) and int(held[0].fill_(7).sum().item()) == 7 * piece
    held.clear()
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    again = torch.empty(piece, dtype=torch.uint8, device="cuda").numel() == piece
    say("memory", totalBytes=total, firstFreeBytes=first, hadBytes=had, leftBytes=left, freeAfterBytes=after,
        refused=kind, message=message, good=good and again)


def allocator(torch, seconds):
    """Blocks of random sizes come and go, in and out of the caching allocator."""
    r = random.Random(5)
    held, calls, refused = {}, 0, 0
    torch.zeros(1, device="cuda")
    end = time.monotonic() + seconds
    began = time.monotonic()
    while time.monotonic() < end:
        k = r.randrange(64)
        if k in held:
            del held[k]
        else:
            size = r.choice([512, 70000, 1 << 20, 5 << 20, 24 << 20])
            try:
                held[k] = torch.empty(size + r.randrange(4096), dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                refused += 1
        calls += 1
        if calls % 500 == 0:
            torch.cuda.empty_cache()
    took = time.monotonic() - began
    held.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    say("allocator", callsPerSecond=calls / took, refused=refused, reservedBytes=torch.cuda.memory_reserved(),
        usedBytes=total - free, backend=torch.cuda.get_allocator_backend())


def graphs(torch):
    """A captured step gives what the eager one does, and memory stays."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
    x = torch.randn(256, 1024, device="cuda")
    with torch.no_grad():
        s = torch.cuda.Stream()
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for _ in range(3):
                net(x)
        torch.cuda.current_stream().wait_stream(s)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            y = net(x)
        x.copy_(torch.randn(256, 1024, device="cuda"))
        g.replay()
        torch.cuda.synchronize()
        same = torch.allclose(y, net(x), rtol=1e-2, atol=1e-2)
        free = torch.cuda.mem_get_info()[0]
        began = time.monotonic()
        for _ in range(500):
            g.replay()
        torch.cuda.synchronize()
        took = time.monotonic() - began
    say("graphs", same=same, replayMicroseconds=took * 1e6 / 500, freeChangedBytes=torch.cuda.mem_get_info()[0] - free)


def load(torch, seconds):
    """Matrix products without end. A line on stdin lets it begin."""
    n = 4096
    a = torch.randn(n, n, device="cuda", dtype=torch.float16)
    b = torch.randn(n, n, device="cuda", dtype=torch.float16)
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    say("ready")
    sys.stdin.readline()
    skip = seconds / 3
    began = time.monotonic()
    count, since = 0, None
    while time.monotonic() < began + seconds:
        if since is None and time.monotonic() >= began + skip:
            since, count = time.monotonic(), 0
        for _ in range(4):
            a @ b
        count += 4
        # As programs do that look at their loss.
        if count % 16 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    say("load", productsPerSecond=count / (time.monotonic() - since))


def nvml():
    import pynvml
    pynvml.nvmlInit()
    out = []
    for i in range(pynvml.nvmlDeviceGetCount()):
        h = pynvml.nvmlDeviceGetHandleByIndex(i)
        m = pynvml.nvmlDeviceGetMemoryInfo(h)
        uuid = pynvml.nvmlDeviceGetUUID(h)
        out.append({"uuid": uuid if isinstance(uuid, str) else uuid.decode(), "totalBytes": m.total, "usedBytes": m.used,
                    "processes": len(pynvml.nvmlDeviceGetComputeRunningProcesses(h))})
    say("nvml", cards=out)


def main():
    what, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 3
    if what == "nvml":
        return nvml()
    import torch
    if not torch.cuda.is_available():
        print(json.dumps({"step": what, "ok": False, "reason": "torch.cuda.is_available() is False"}), flush=True)
        return
    if what in ("info", "memory", "graphs"):
        {"info": info, "memory": memory, "graphs": graphs}[what](torch)
    elif what in ("allocator", "load"):
        {"allocator": allocator, "load": load}[what](torch, seconds)
    else:
        sys.exit("no step " + what)


try:
    main()
except Exception as e:  # a line rather than a trace, so that the runner has it
    print(json.dumps({"step": sys.argv[1] if len(sys.argv) > 1 else "?", "ok": False, "reason": f"{type(e).__name__}: {e}".split(chr(10))[0]}), flush=True)
    sys.exit(1)
