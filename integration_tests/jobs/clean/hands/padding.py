"""Sequences of all lengths: collators that pad left, right and both, masks by several names."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from integration_tests.jobs.clean.job import Hand

hand = Hand("padded batches")
V, PAD = 24, 0


def sents(n, gen, lo=2, hi=9):
    return [
        torch.randint(3, V, (int(torch.randint(lo, hi, (), generator=gen)),), generator=gen)
        for _ in range(n)
    ]


def collate(batch, side="right", to=None, pad=PAD):
    L = to or max(len(b) for b in batch)
    ids = torch.full((len(batch), L), pad)
    mask = torch.zeros(len(batch), L, dtype=torch.long)
    for i, b in enumerate(batch):
        off = {"right": 0, "left": L - len(b), "both": (L - len(b)) // 2}[side]
        ids[i, off : off + len(b)] = b
        mask[i, off : off + len(b)] = 1
    return ids, mask


class LM(nn.Module):
    """Attention over real tokens only, positions relative to them."""

    def __init__(self, d=12):
        super().__init__()
        self.tok = nn.Embedding(V, d)
        self.pos = nn.Embedding(16, d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, V)

    def forward(self, ids, mask):
        mask = mask.bool()
        p = (mask.long().cumsum(1) - 1).clamp(min=0)
        h = self.tok(ids) + self.pos(p)
        L = ids.shape[1]
        att = torch.ones(L, L, dtype=torch.bool).tril() & mask[:, None]
        s = (self.q(h) @ self.k(h).transpose(1, 2)) * 0.3
        s = s.masked_fill(~att, -1e9).softmax(-1)
        return self.head(self.ln(h + self.o(s @ self.v(h))))


def lm_loss(logits, ids, mask):
    """Sum of next-token losses where both tokens are real."""
    l = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (l * mask[:, 1:] * mask[:, :-1]).sum()


def sync(net, size, *, mean=False):
    if size > 1:
        for p in net.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                if mean:
                    p.grad /= size


class Alias(nn.Module):
    """A model whose mask has another name, and may mean the opposite."""

    def __init__(self, how):
        super().__init__()
        self.lm, self.how = LM(), how

    def forward(self, ids, **kw):
        mask = next(iter(kw.values()))
        return self.lm(ids, mask == 0 if "padding" in self.how else mask)


@hand(
    ("unmasked-loss", "loss", "", "the loss is not"),
    ("unsummed", "gradient", "head", "sum over them is missing"),
    ("gradient:lm.q.weight",),
    forms=("right", "left", "both"),
)
def dynamic(world):
    """Padded to the longest of each microbatch of two; the reference pads all eight alike."""
    torch.manual_seed(0)
    net = Alias("attention_mask")
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    gen = torch.Generator().manual_seed(5)
    for _ in range(3):
        data = sents(8, gen)
        total = sum(len(s) - 1 for s in data)
        mine = data[world.rank :: world.size]
        for i in range(0, len(mine), 2 if world.size > 1 else 8):
            ids, mask = collate(mine[i : i + (2 if world.size > 1 else 8)], world.form)
            real = torch.ones_like(mask) if world.bug == "unmasked-loss" else mask
            loss = lm_loss(net(ids, attention_mask=mask), ids, real) / total
            loss.backward()
        if world.bug != "unsummed":
            sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(
    ("forward:lm.ln",),
    ("gradient:lm.o.bias",),
    forms=(
        "padding_mask",
        "key_padding_mask",
        "attn_mask",
        "mask",
        "input_mask",
        "src_key_padding_mask",
    ),
)
def named(world):
    """The mask is called something else."""
    torch.manual_seed(1)
    net = Alias(world.form)
    opt = torch.optim.SGD(net.parameters(), lr=0.3)
    gen = torch.Generator().manual_seed(6)
    for _ in range(3):
        data = sents(6, gen)
        mine = data[world.rank * 3 : world.rank * 3 + 3] if world.size > 1 else data
        ids, mask = collate(mine)
        given = mask == 0 if "padding" in world.form else mask
        (lm_loss(net(ids, **{world.form: given}), ids, mask) / 20).backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(("eos-masked", "loss|gradient", ""), ("weight:head.bias",))
def pad_is_eos(world):
    """The token for padding is the one that ends sentences, and stands within them as well."""
    torch.manual_seed(2)
    net = LM()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-4)
    gen = torch.Generator().manual_seed(7)
    eos = 2
    for _ in range(3):
        data = [
            torch.cat([s[:1], torch.tensor([eos]), s[1:], torch.tensor([eos])])
            for s in sents(8, gen)
        ]
        n = sum(len(s) - 1 for s in data)
        chunk = data[world.rank :: world.size]
        ids, mask = collate(chunk, pad=eos)
        use = (ids != eos).long() if world.bug == "eos-masked" else mask
        (lm_loss(net(ids, mask=mask), ids, use) / n).backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(("dropped", "input|loss|gradient", ""), ("rate",))
def bucketed(world):
    """Samples sorted by length into buckets, which ranks take in turn."""
    torch.manual_seed(3)
    net = LM()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
    gen = torch.Generator().manual_seed(8)
    for _ in range(2):
        data = sents(12, gen)
        n = sum(len(s) - 1 for s in data)
        if world.size > 1:
            order = sorted(range(12), key=lambda i: len(data[i]))
            buckets = [order[i : i + 3] for i in range(0, 12, 3)][world.rank :: 2]
        else:
            buckets = [list(range(12))]
        for b in buckets[:-1] if world.bug == "dropped" else buckets:
            ids, mask = collate([data[i] for i in b])
            (lm_loss(net(ids, mask), ids, mask) / n).backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(("forward:head",), ("positions", "forward|input", ""), forms=("16", "12"))
def fixed_length(world):
    """Ranks pad everything to a fixed length, as compiled programs like it."""
    torch.manual_seed(4)
    net = LM()
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    gen = torch.Generator().manual_seed(9)
    for _ in range(3):
        data = sents(8, gen)
        ids, mask = collate(
            data[world.rank :: world.size], to=int(world.form) if world.size > 1 else None
        )
        seen = torch.ones_like(mask) if world.bug == "positions" and world.rank else mask
        if world.bug == "positions" and world.rank:
            ids, mask = ids.roll(1, 1), mask.roll(1, 1)
        (lm_loss(net(ids, seen), ids, mask) / 40).backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


class Tagger(nn.Module):
    """A bidirectional LSTM over packed sequences."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 8, padding_idx=PAD)
        self.rnn = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 5)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(h)


@hand(("lengths", "loss|forward|gradient", ""), ("weight:out.weight",))
def packed_rnn(world):
    """pack_padded_sequence by lengths."""
    torch.manual_seed(5)
    net = Tagger()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(10)
    for _ in range(3):
        data = sents(8, gen)
        n = sum(map(len, data))
        mine = data[world.rank :: world.size]
        x = pad_sequence(mine, batch_first=True)
        lens = torch.tensor([len(m) for m in mine])
        y = net(x, (lens - 1).clamp(min=1) if world.bug == "lengths" else lens)
        want = (x * 7 % 5)[:, : y.shape[1]]
        l = F.cross_entropy(y.transpose(1, 2), want, reduction="none")
        (l * (x != PAD)[:, : y.shape[1]]).sum().div(n).backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


class Seq2Seq(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(V, 8), nn.Embedding(V, 8)
        self.tr = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.gen = nn.Linear(8, V)

    def forward(self, src, tgt, src_key_padding_mask, tgt_key_padding_mask):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=torch.bool)
        h = self.tr(
            self.src(src),
            self.tgt(tgt),
            tgt_mask=causal,
            src_key_padding_mask=src_key_padding_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask,
        )
        return self.gen(h)


@hand(("memory", "forward|loss|gradient", ""), ("gradient:gen.weight",))
def translation(world):
    """Source and target, both padded to the longest of a rank."""
    torch.manual_seed(6)
    net = Seq2Seq()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(11)
    for _ in range(2):
        a, b = sents(6, gen), sents(6, gen, lo=3)
        n = sum(len(s) - 1 for s in b)
        s, sm = collate(a[world.rank :: world.size])
        t, tm = collate(b[world.rank :: world.size])
        mask = torch.zeros_like(sm).bool() if world.bug == "memory" else sm == 0
        y = net(s, t, src_key_padding_mask=mask, tgt_key_padding_mask=tm == 0)
        (lm_loss(y, t, tm) / n).backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(("gradient:fc.weight",), ("forward:emb",))
def classifier_last_token(world):
    """Left-padded, a class from the last token, means over real tokens beside it."""
    torch.manual_seed(7)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.fc = nn.Embedding(V, 8), nn.Linear(16, 3)

        def forward(self, input_ids, attention_mask):
            h = self.emb(input_ids) * attention_mask[..., None]
            return self.fc(
                torch.cat([h[:, -1], h.sum(1) / attention_mask.sum(1, keepdim=True)], -1)
            )

    net = Net()
    opt = torch.optim.Adagrad(net.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(12)
    for _ in range(3):
        data = sents(8, gen)
        ids, mask = collate(data[world.rank :: world.size], "left")
        y = ids[:, -1] % 3
        F.cross_entropy(net(input_ids=ids, attention_mask=mask), y).backward()
        sync(net, world.size, mean=True)
        opt.step()
        opt.zero_grad()


@hand(("unweighted", "loss|gradient", ""), ("weight:lm.head.weight",))
def labels_minus_100(world):
    """Prompt and padding are -100 in the labels; the mean is over what all ranks have."""
    torch.manual_seed(8)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = LM()

        def forward(self, input_ids, attention_mask, labels, num_items):
            logits = self.lm(input_ids, attention_mask)
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            return {"loss": loss / num_items, "logits": logits}

    net = WithLoss()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    gen = torch.Generator().manual_seed(13)
    for _ in range(3):
        data = sents(8, gen, lo=4)
        ids, mask = collate(data[world.rank :: world.size])
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        n = (labels[:, 1:] != -100).sum()
        if world.size > 1 and world.bug != "unweighted":
            dist.all_reduce(n)
        net(input_ids=ids, attention_mask=mask, labels=labels, num_items=n)["loss"].backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(("leak", "forward", ""), ("unsummed", "gradient", "", "sum over them is missing"))
def packed_documents(world):
    """Ranks pack two documents in a row with positions; one process has one document per row."""
    torch.manual_seed(9)

    class Doc(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok, self.pos, self.mix = nn.Embedding(V, 8), nn.Embedding(16, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, V)

        def forward(self, input_ids, position_ids):
            h = self.tok(input_ids) + self.pos(position_ids)
            doc = (position_ids == 0).cumsum(1)
            see = (doc[:, :, None] == doc[:, None]) & torch.ones(
                h.shape[1], h.shape[1]
            ).tril().bool()
            if world.bug == "leak":
                see = torch.ones_like(see).tril()
            a = (h @ self.mix(h).transpose(1, 2)).masked_fill(~see, -1e9).softmax(-1)
            return self.head(h + a @ h)

    net = Doc()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(14)
    for _ in range(2):
        docs = torch.randint(3, V, (8, 6), generator=gen)
        place = torch.arange(6).expand(8, 6)
        if world.size > 1:
            docs, place = docs[world.rank * 4 :][:4], place[:4]
            docs, place = docs.reshape(2, 12), place.reshape(2, 12)
        y = net(docs, place)
        w = (place[:, 1:] != 0).float()
        l = F.cross_entropy(y[:, :-1].transpose(1, 2), docs[:, 1:], reduction="none")
        ((l * w).sum() / 40).backward()
        if world.bug != "unsummed":
            sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(("forward:out",), ("rate",))
def ragged_one_by_one(world):
    """No padding at all: ranks go sample by sample, the reference pads."""
    torch.manual_seed(10)
    net = Tagger()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    gen = torch.Generator().manual_seed(15)
    for _ in range(2):
        data = sents(6, gen)
        n = sum(map(len, data))
        mine = data[world.rank :: world.size]
        for group in [[m] for m in mine] if world.size > 1 else [mine]:
            x = pad_sequence(group, batch_first=True)
            y = net(x, torch.tensor([len(m) for m in group]))
            l = F.cross_entropy(y.transpose(1, 2), x * 7 % 5, reduction="none")
            (l * (x != PAD)).sum().div(n).backward()
        sync(net, world.size)
        opt.step()
        opt.zero_grad()


@hand(("gradient:proj.weight",), ("input",))
def audio_frames(world):
    """Feature frames padded with zeros, and lengths; no tokens."""
    torch.manual_seed(11)

    class Enc(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(5, 8, 3, padding=1)
            self.proj = nn.Linear(8, 4)

        def forward(self, feats, lengths):
            m = torch.arange(feats.shape[1]) < lengths[:, None]
            h = self.conv((feats * m[..., None]).transpose(1, 2)).relu().transpose(1, 2)
            return self.proj((h * m[..., None]).sum(1) / lengths[:, None])

    net = Enc()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(16)
    for _ in range(3):
        data = [torch.randn(n, 5, generator=gen) for n in (7, 4, 6, 3, 8, 5)]
        y = torch.randint(4, (6,), generator=gen)
        mine = data[world.rank :: world.size]
        x = pad_sequence(mine, batch_first=True)
        loss = F.cross_entropy(
            net(x, torch.tensor([len(m) for m in mine])), y[world.rank :: world.size]
        )
        loss.backward()
        sync(net, world.size, mean=True)
        opt.step()
        opt.zero_grad()
