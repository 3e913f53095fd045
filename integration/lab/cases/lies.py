"""A peer that joins as a real one does, and then lies: on the queue pair, in the words of the line, by silence.

It can hurt the stream that it could have reset, stalled or garbled over TCP as well, and no other. Each row is what
`programs/lying_peer.cc` does after an honest beginning, what its own connection must come to at the server, and
what the peer must have heard. Meanwhile two streams of an honest client go on, by the same keeper, device and queues.
"""

import re

import trial
from hostile import refusals, unharmed
from servers import ask, serve

group = trial.Group(trial.TWO_HOSTS)

READY, START, FROZEN, RECALL, END, END_OK, REPLAYED, BYE = range(1, 9)
CREDIT = 1 << 31
RING = 64 << 10

# Both directions in the ring: 1000 bytes and a few by TCP, then 6000 there and 3000 back by the ring, no credit given.
SENDING = "tcp:1000 lift start ring:3000"
BOTH = SENDING + " ready ring:3000 ring:3000"
RESET = "ECONNRESET"
BROKE = "peer broke the protocol"
WENT = "the peer went with bytes of ours unread"


def lie(t, server, name, steps, end, heard="", reason=""):
    """`end`: how the server's program sees its connection end. `heard`: what the peer prints, a pattern."""
    before = server.log().count(reason) if reason else 0
    peer = t.start(t.client, f"{t.tool('lying_peer')} address={t.server.address} port={t.port} from={t.client.address} {steps}",
                   shim=False)
    status = t.finish(peer, 90)
    t.expect(f"{name}: the peer comes to its end", status == 0 and "\ndone" in peer.out, (status, peer.out[-300:]))
    t.expect(f"{name}: it hears {heard!r}", re.search(heard, peer.out, re.S), peer.out[-300:])
    port = re.search(r"^port (\d+)", peer.out)
    line = f"ended {port[1] if port else '?'}: "
    t.expect(f"{name}: the server's connection ends", trial.wait_until(lambda: line in server.out, 30), server.out[-200:])
    seen = server.out.partition(line)[2].partition("\n")[0]
    t.expect(f"{name}: it ends with {end}", seen == end, (seen, peer.out[-300:]))
    if reason:
        t.expect(f"{name}: the log says {reason!r}", server.log().count(reason) > before, server.log()[-500:])


def lies(t, rows, refused=0):
    server = serve(t, "threads", env={"RSOCK_LIFT_BYTES": "1"}, strict=False)
    client = ask(t, "conns=2 seconds=500 size=8192 pause=50")
    t.expect_lifts(client, 2, 12)
    for name, row in rows.items() if t.rdma else ():
        lie(t, server, name, *row)
    unharmed(t, server, client)
    if t.rdma and refused:
        refusals(t, server, refused)


@group.case(beside=True)
def an_honest_one(t):
    """The beginning that all have, and every honest end: else the lies would prove nothing."""
    lies(t, {
        "both directions, an orderly end": (f"{BOTH} credit close", "eof", "over: EOF"),
        "one direction": (f"{SENDING} close", "eof", "over: EOF"),
        "set down, and on by TCP": (f"{BOTH} settle tcp:5000 close", "eof", r"replayed \d+.*over: EOF"),
        "credit again and again": (f"{BOTH} credit " + "ring:30000 credit " * 6 + "close", "eof", "over: EOF"),
    })


@group.case(beside=True)
def beyond_the_ring(t):
    """The device refuses, the queue pair is lost, and the stream goes on by TCP."""
    def row(step):
        return f"{BOTH} {step} settle tcp:5000 close", "eof", r": (remote access error|remote invalid request).*over: EOF"
    lies(t, {
        "just behind": row(f"write:{RING}:64"),
        "just before": row("write:-64:64"),
        "across the end": row(f"write:{RING - 32}:64"),
        "far away": row("write:1099511627776:8"),
        "another key": row("write:0:64:4660"),
        "a read": row("read"),
    })


def broken_by(step, steps=BOTH):
    """The row of a step that no honest peer takes."""
    return f"{steps} {step} over", RESET, "over: ECONNRESET", BROKE


@group.case(beside=True)
def impossible_counts(t):
    counts = {
        "more than a ring": broken_by(f"imm:{RING + 1}"),
        "far more": broken_by(f"imm:{CREDIT - 1}"),
        "nothing": broken_by("imm:0"),
        # Its way back is full after the first, it reads no more: and its keeper finds the lie while it waits in send.
        "more than the room": broken_by(f"imm:{RING} imm:{RING} imm:{RING}"),
        "credit for what was never sent": broken_by(f"credit imm:{CREDIT + 1}"),
        "credit twice": broken_by(f"credit imm:{CREDIT + 3000}"),
        "credit without end": broken_by(f"imm:{2 * CREDIT - 1}"),
        "credit to who sent nothing": broken_by(f"imm:{CREDIT + 1}", SENDING),
    }
    lies(t, counts | {
        "credit of nothing": (f"{BOTH} imm:{CREDIT} ring:1000 credit close", "eof", "over: EOF"),
    }, len(counts))


@group.case(beside=True)
def words_out_of_order(t):
    broken = {
        "END twice": broken_by(f"word:{END}:9100 word:{END}:9100"),
        "END before what has come": broken_by(f"word:{END}:10"),
        "bytes behind END": broken_by(f"word:{END}:9100 imm:101"),
        "END_OK that nobody asked for": broken_by(f"word:{END_OK}:got"),
        "END_OK for another byte": broken_by(f"word:{END_OK}:7"),
        "FROZEN beyond what was sent": broken_by(f"word:{FROZEN}:1000000"),
        "FROZEN that takes back a credit": broken_by(f"credit word:{FROZEN}:10"),
        "START twice": broken_by(f"word:{START}:1000"),
        "START for bytes that have come": broken_by(f"word:{START}:10", "tcp:1000 lift"),
    }
    lies(t, broken | {
        # Nothing is wrong for who hears it, and the stream goes on.
        "READY twice": (f"{BOTH} word:{READY}:0 ring:1000 credit close", "eof", "over: EOF"),
        "REPLAYED that nobody waits for": (f"{BOTH} word:{REPLAYED}:0 ring:1000 credit close", "eof", "over: EOF"),
        "RECALL three times": (f"{BOTH} word:{RECALL}:0 word:{RECALL}:0 settle tcp:1000 close", "eof", "over: EOF"),
        "FROZEN twice": (f"{BOTH} word:{FROZEN}:got hear:{REPLAYED} word:{FROZEN}:10 ring:1000 close", "eof", "over: EOF"),
        "FROZEN after END_OK": (f"{BOTH} credit word:{END}:sent hear:{END_OK} fin hear:{END} word:{END_OK}:got "
                                f"word:{FROZEN}:10 over", "eof", "over: EOF"),
        "END again when all is over": (f"{BOTH} credit word:{END}:sent hear:{END_OK} word:{END}:sent close", "eof", "over: EOF"),
        "BYE, all counted": (f"{BOTH} credit word:{BYE}:0 tcp:1000 fin over", "eof", "over: EOF"),
        # It stands still, as it could over TCP; and then it goes.
        "START for bytes that never come": (f"tcp:1000 lift word:{START}:1000000 put:100 nap:2000", RESET),
        "BYE with bytes unread": (f"{BOTH} word:{BYE}:0 over", RESET, "over: ECONNRESET", WENT),
        "an unknown word": (f"{BOTH} word:99:0 over", RESET, "line: closed.*over: ECONNRESET", WENT),
        "a number that is none": (f"{BOTH} word:{END}:18446744073709551615 over", RESET, "line: closed.*over: ECONNRESET", WENT),
    }, len(broken) + 3)


@group.case(beside=True)
def pairs_without_a_use(t):
    lies(t, {
        "WANT without a queue pair": ("tcp:1000 ask tcp:5000 close", "eof", "over: EOF"),
        "a queue pair that is never used": ("tcp:1000 lift tcp:5000 nap:3000 tcp:5000 fin nap:1000", RESET),
        "the same, and BYE": (f"tcp:1000 lift tcp:5000 word:{BYE}:0 tcp:5000 close", "eof", "over: EOF"),
        "a second queue pair": (f"{BOTH} join ring:1000 credit close", "eof", "join: RDMA_CM_EVENT_REJECTED.*over: EOF"),
        "a second WANT": (f"{BOTH} want ring:1000 credit close", "eof", "want: [25].*over: EOF"),
        "it is lost, the words are not": (f"{BOTH} drop_pair settle tcp:5000 close", "eof", "over: EOF"),
    }, 1)


@group.case(beside=True)
def line_dropped(t):
    lies(t, {
        "before the queue pair": ("tcp:1000 ask drop_line tcp:5000 close", "eof", "over: EOF"),
        "all counted, and on by TCP": (f"{BOTH} credit drop_line tcp:5000 close", "eof", "over: EOF"),
        "all counted and ended": (f"{BOTH} credit word:{END}:sent hear:{END_OK} drop_line close", "eof", "over: EOF"),
        "bytes unread": (f"{BOTH} drop_line over", RESET, "over: ECONNRESET", WENT),
        "not ended: nobody knows what is missing": (f"{BOTH} credit drop_line fin nap:3000", RESET),
        "all at once": (f"{BOTH} put:1000", RESET),
    })
