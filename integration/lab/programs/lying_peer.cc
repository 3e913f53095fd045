// A peer that joins as a real one does, by the line and a queue pair, and then lies.
//
//   lying_peer address=A port=N from=A STEP...
//
// Connects to an echo server at address:port from `from`, and takes the steps in turn. Prints a
// line for each that has something to say; `FAILED ...` and status 99 when the honest part of it
// does not come about, `done` at the end.
//
//   tcp:N            N known bytes on TCP, and back from wherever the server sends; checked
//   ask              FIND, a line, WANT; no queue pair follows
//   lift             the same and JOIN: the channel is agreed on. The server has said READY
//   start            our START: what follows goes by the ring
//   ready            our READY: the server may send by the ring; its START comes with an echo
//   ring:N           N known bytes by the ring, and back; checked
//   put:N            N known bytes by the ring, nothing is awaited
//   credit           for all that came by the ring
//   imm:VALUE        an empty write with this immediate value
//   write:OFF:N[:K]  N bytes at OFF of the ring, with key K; prints the completion
//   read             of the server's ring; prints the completion
//   word:W:V         a word by its number. V: a number, `sent` or `got` (bytes by the ring)
//   line:HEX         bytes on the line
//   hear:W           until this word comes; prints its value
//   settle           calls both directions back to TCP and obeys the words; BYE
//   join             one more queue pair for the same channel; prints what comes of it
//   want             one more WANT for the same stream; prints the verdict
//   fin              of TCP, without a word
//   close            an orderly end, awaited
//   over             until the server ends the connection; prints how
//   drop_line, drop_pair, nap:MS
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/random.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/wire/cm_data.h"
#include "core/wire/line.h"
#include "core/wire/mac.h"
#include "lab_net.h"

namespace {

using namespace rsock;

constexpr uint32_t kRing = 64 * 1024;
constexpr uint32_t kCredit = uint32_t{1} << 31;
constexpr long kPatienceMs = 15'000;

[[noreturn]] void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  printf("FAILED ");
  vprintf(format, args);
  printf("\n");
  fflush(stdout);
  _exit(99);
}

/// Ends the program when what it waits for does not come.
class Patience {
 public:
  explicit Patience(const char* what) : what_(what) {}
  void wait() const {
    if (now_ms() > until_) fail("no %s", what_);
    pause_ms(1);
  }

 private:
  const char* const what_;
  const long until_ = now_ms() + kPatienceMs;
};

uint64_t random_number() {
  uint64_t v = 0;
  if (getrandom(&v, sizeof(v), 0) != sizeof(v)) fail("getrandom");
  return v;
}

wire::Endpoint endpoint(const sockaddr_storage& name) {
  // A tuple needs two ends; the other one does not matter.
  const auto t = wire::FourTuple::from(reinterpret_cast<const sockaddr*>(&name), sizeof(name),
                                       reinterpret_cast<const sockaddr*>(&name), sizeof(name));
  if (!t) fail("address");
  return t->local;
}

wire::FourTuple tuple_of(int fd) {
  sockaddr_storage local, remote;
  socklen_t local_size = sizeof(local), remote_size = sizeof(remote);
  getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_size);
  getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &remote_size);
  return wire::FourTuple{endpoint(local), endpoint(remote), 0};
}

int connect_from(const char* from, const char* to, int port) {
  sockaddr_storage local, remote;
  const socklen_t size = address_of(from, 0, &local);
  address_of(to, port, &remote);
  const int fd = socket(local.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
  if (bind(fd, reinterpret_cast<sockaddr*>(&local), size) != 0) fail("bind: %s", strerror(errno));
  if (connect(fd, reinterpret_cast<sockaddr*>(&remote), size) != 0)
    fail("connect: %s", strerror(errno));
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fd;
}

/// Whatever can be read now: bytes, 0 at the end, -1 for nothing or (errno) an error.
ssize_t read_now(int fd, void* to, size_t n) { return recv(fd, to, n, MSG_DONTWAIT); }

// --- the connection manager --------------------------------------------------------------------

struct CmAnswer {
  rdma_cm_event_type kind{};
  std::vector<uint8_t> data;
};

class Cm {
 public:
  explicit Cm(const char* from) : from_(from) {
    if (channel_ == nullptr) fail("rdma_create_event_channel");
  }
  rdma_cm_id* route_to(const char* address, int port) {
    sockaddr_storage local, remote;
    address_of(from_, 0, &local);
    address_of(address, port, &remote);
    rdma_cm_id* id = nullptr;
    if (rdma_create_id(channel_, &id, nullptr, RDMA_PS_TCP) != 0) fail("rdma_create_id");
    if (rdma_resolve_addr(id, reinterpret_cast<sockaddr*>(&local),
                          reinterpret_cast<sockaddr*>(&remote), 3000) != 0 ||
        next().kind != RDMA_CM_EVENT_ADDR_RESOLVED || rdma_resolve_route(id, 3000) != 0 ||
        next().kind != RDMA_CM_EVENT_ROUTE_RESOLVED) {
      fail("no route to %s:%d", address, port);
    }
    return id;
  }
  CmAnswer connect(rdma_cm_id* id, const uint8_t* data, size_t size) {
    rdma_conn_param how{};
    how.private_data = data;
    how.private_data_len = static_cast<uint8_t>(size);
    how.retry_count = 6;
    how.rnr_retry_count = 7;
    if (rdma_connect(id, &how) != 0) fail("rdma_connect: %s", strerror(errno));
    return next();
  }

 private:
  CmAnswer next() {
    pollfd wait{channel_->fd, POLLIN, 0};
    if (poll(&wait, 1, kPatienceMs) != 1) fail("no answer of the connection manager");
    rdma_cm_event* event = nullptr;
    if (rdma_get_cm_event(channel_, &event) != 0) fail("rdma_get_cm_event");
    CmAnswer answer{event->event, {}};
    const auto* data = static_cast<const uint8_t*>(event->param.conn.private_data);
    if (event->event == RDMA_CM_EVENT_REJECTED || event->event == RDMA_CM_EVENT_ESTABLISHED)
      answer.data.assign(data, data + event->param.conn.private_data_len);
    rdma_ack_cm_event(event);
    return answer;
  }

  const char* const from_;
  rdma_event_channel* const channel_ = rdma_create_event_channel();
};

/// A queue pair and a ring that the peer may write.
struct Pair {
  explicit Pair(rdma_cm_id* cm_id) : id(cm_id) {
    pd = ibv_alloc_pd(id->verbs);
    cq = ibv_create_cq(id->verbs, 256, nullptr, nullptr, 0);
    ring.resize(kRing);
    out.resize(2 * kRing);
    ring_mr =
        ibv_reg_mr(pd, ring.data(), ring.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    out_mr = ibv_reg_mr(pd, out.data(), out.size(), IBV_ACCESS_LOCAL_WRITE);
    ibv_qp_init_attr wanted{};
    wanted.qp_type = IBV_QPT_RC;
    wanted.send_cq = wanted.recv_cq = cq;
    wanted.cap = {64, 128, 1, 1, 0};
    if (pd == nullptr || cq == nullptr || ring_mr == nullptr || out_mr == nullptr ||
        rdma_create_qp(id, pd, &wanted) != 0) {
      fail("rdma_create_qp: %s", strerror(errno));
    }
    for (int i = 0; i < 100; ++i) post_receive();
  }
  void post_receive() {
    ibv_recv_wr entry{}, *bad = nullptr;
    (void)ibv_post_recv(id->qp, &entry, &bad);
  }
  rdma_cm_id* id;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;
  ibv_mr* ring_mr = nullptr;
  ibv_mr* out_mr = nullptr;
  std::vector<uint8_t> ring, out;
};

// --- the peer ----------------------------------------------------------------------------------

class Peer {
 public:
  Peer(const char* address, int port, const char* from)
      : address_(address),
        from_(from),
        port_(port),
        cm_(from),
        tcp_(connect_from(from, address, port)) {
    tuple_ = tuple_of(tcp_);
    printf("port %d\n", tuple_.local.port);
  }

  // --- honest ---

  void tcp(size_t n) {
    std::vector<uint8_t> bytes = next_bytes(n);
    for (size_t done = 0; done < n;) {
      const ssize_t r = ::send(tcp_, bytes.data() + done, n - done, MSG_NOSIGNAL);
      if (r <= 0) fail("send: %s", strerror(errno));
      done += static_cast<size_t>(r);
    }
    await_echo();
  }

  void ask() {
    find();
    open_line();
    nonce_ = random_number() >> 1 | 1;
    if (const auto verdict = want(nonce_); verdict != wire::Verdict::kOk)
      fail("offer: %d", static_cast<int>(verdict));
  }
  void lift() {
    ask();
    pair_.emplace(cm_.route_to(address_, offer_.rdma_port));
    const CmAnswer answer = send_join(*pair_);
    if (answer.kind != RDMA_CM_EVENT_ESTABLISHED) fail("join: %s", rdma_event_str(answer.kind));
    const auto theirs = wire::decode_join(answer.data.data(), answer.data.size());
    if (!theirs) fail("join: %s", theirs.error().reason);
    theirs_ = *theirs;
    // Its thread sits in the kernel until a byte comes; READY is said on its way out.
    const Patience patience("READY");
    while (!heard_.count(wire::Word::kReady)) {
      tcp(1);
      patience.wait();
    }
  }

  void start() {
    start_ = sent_;
    say(wire::Word::kStart, sent_);
  }
  void ready() { say(wire::Word::kReady, 0); }

  void put(size_t n) {
    const std::vector<uint8_t> bytes = next_bytes(n);
    for (size_t done = 0; done < n;) {  // one packet each, as rxe needs it
      const size_t at = put_ % kRing,
                   piece = std::min({n - done, size_t{kRing} - at, size_t{1024}});
      memcpy(pair_->out.data() + at, bytes.data() + done, piece);
      const ibv_wc_status status = write(at, at, piece, 0, static_cast<uint32_t>(piece));
      if (status != IBV_WC_SUCCESS) fail("write: %s", ibv_wc_status_str(status));
      put_ += piece;
      done += piece;
    }
  }
  void ring(size_t n) {
    put(n);
    await_echo();
  }
  void credit() { immediate(kCredit | static_cast<uint32_t>(std::exchange(uncredited_, 0))); }

  void settle() {
    const Patience patience("words that give both directions back");
    bool replayed_said = false;
    say(wire::Word::kRecall, 0);
    say(wire::Word::kFrozen, got_ring_);
    while (!heard_.count(wire::Word::kReplayed) || !replayed_said) {
      patience.wait();
      turn();
      if (heard_.count(wire::Word::kFrozen) && !replayed_said) {
        replay(heard_[wire::Word::kFrozen]);
        say(wire::Word::kReplayed, 0);
        replayed_said = true;
      }
    }
    say(wire::Word::kBye, 0);
    start_.reset();
    their_start_.reset();
  }

  void close() {
    if (start_ && line_ >= 0) {
      say(wire::Word::kEnd, put_);
      hear(wire::Word::kEndOk);
    }
    shutdown(tcp_, SHUT_WR);
    honest_ = true;
    over();
  }

  // --- not ---

  void word(const std::string& which, const std::string& value) {
    const uint64_t v = value == "sent"  ? put_
                       : value == "got" ? got_ring_
                                        : strtoull(value.c_str(), nullptr, 0);
    say(static_cast<wire::Word>(atoi(which.c_str())), v);
  }
  void immediate(uint32_t value) {
    printf("imm %08x: %s\n", value, ibv_wc_status_str(write(0, 0, 0, 0, value)));
  }
  void write_at(long offset, size_t n, uint32_t key) {
    printf("write: %s\n", ibv_wc_status_str(write(offset, 0, n, key, static_cast<uint32_t>(n))));
  }
  void read() {
    ibv_sge to{reinterpret_cast<uint64_t>(pair_->out.data()), 64, pair_->out_mr->lkey};
    ibv_send_wr entry{};
    entry.opcode = IBV_WR_RDMA_READ;
    entry.sg_list = &to;
    entry.num_sge = 1;
    entry.wr.rdma.remote_addr = theirs_.ring_address;
    entry.wr.rdma.rkey = theirs_.ring_key;
    printf("read: %s\n", ibv_wc_status_str(post(entry)));
  }
  void join_again() {
    Pair second(cm_.route_to(address_, offer_.rdma_port));
    printf("join: %s\n", rdma_event_str(send_join(second).kind));
  }
  void want_again() { printf("want: %d\n", static_cast<int>(want(random_number() >> 1 | 1))); }
  void raw(const std::string& hex) {
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i + 1 < hex.size(); i += 2)
      bytes.push_back(static_cast<uint8_t>(strtoul(hex.substr(i, 2).c_str(), nullptr, 16)));
    on_line(bytes.data(), bytes.size());
  }
  void hear(wire::Word w) {
    char name[32];
    snprintf(name, sizeof(name), "word %d", static_cast<int>(w));
    const Patience patience(name);
    while (!heard_.count(w)) {
      turn();
      patience.wait();
    }
    printf("heard %d: %llu\n", static_cast<int>(w), static_cast<unsigned long long>(heard_[w]));
  }
  void fin() { shutdown(tcp_, SHUT_WR); }
  void drop_line() { ::close(std::exchange(line_, -1)); }
  void drop_pair() {
    rdma_disconnect(pair_->id);
    rdma_destroy_qp(pair_->id);
  }
  void over() {
    const Patience patience("end of the connection");
    for (;; patience.wait()) {
      turn_line();
      if (honest_ && heard_.count(wire::Word::kEnd) && !std::exchange(end_ok_said_, true))
        say(wire::Word::kEndOk, heard_[wire::Word::kEnd]);
      uint8_t bytes[4096];
      const ssize_t n = read_now(tcp_, bytes, sizeof(bytes));
      if (n > 0) continue;
      if (n < 0 && errno == EAGAIN) continue;
      printf("over: %s\n", n == 0 ? "EOF" : strerrorname_np(errno));
      return;
    }
  }

 private:
  // --- finding ---

  void find() {
    const wire::Find question{random_number(), tuple_};
    uint8_t bytes[wire::kFindSize];
    wire::encode(question, bytes);
    for (const Patience patience("keeper at the RDMA port");; patience.wait()) {
      rdma_cm_id* id = cm_.route_to(address_, port_);
      Pair unused(id);
      const CmAnswer answer = cm_.connect(id, bytes, sizeof(bytes));
      rdma_destroy_qp(id);
      rdma_destroy_id(id);
      const auto found = wire::decode_found(answer.data.data(), answer.data.size());
      if (!found || found->nonce != question.nonce || found->verdict != wire::Verdict::kOk)
        continue;
      found_ = *found;
      return;
    }
  }

  void open_line() {
    line_ = connect_from(from_, address_, found_.line_port);
    wire::Greeting greeting;
    greeting.keeper = random_number();
    greeting.challenge = random_number();
    uint8_t bytes[wire::kGreetingSize];
    wire::encode(greeting, bytes);
    on_line(bytes, sizeof(bytes));
    uint8_t proof[wire::kProofSize];
    wire::encode(wire::Proof{}, proof);
    on_line(proof, sizeof(proof));
  }

  wire::Verdict want(uint64_t nonce) {
    uint8_t bytes[wire::kWantSize];
    wire::encode(wire::Want{nonce, kRing, tuple_}, bytes);
    offered_ = false;
    on_line(bytes, sizeof(bytes));
    const Patience patience("offer");
    wire::Offer before = offer_;
    while (!offered_) {
      patience.wait();
      turn_line();
    }
    const wire::Verdict verdict = offer_.verdict;
    if (verdict != wire::Verdict::kOk) offer_ = before;
    return verdict;
  }

  CmAnswer send_join(Pair& pair) {
    wire::Join ours;
    ours.nonce = nonce_;
    ours.ring_address = reinterpret_cast<uint64_t>(pair.ring.data());
    ours.ring_key = pair.ring_mr->rkey;
    ours.ring_size = kRing;
    uint8_t bytes[wire::kJoinSize];
    wire::encode(ours, bytes);
    return cm_.connect(pair.id, bytes, sizeof(bytes));
  }

  // --- the line ---

  void on_line(const uint8_t* bytes, size_t n) {
    if (line_ < 0 || ::send(line_, bytes, n, MSG_NOSIGNAL) != static_cast<ssize_t>(n))
      printf("line: gone\n");
  }
  void say(wire::Word word, uint64_t value) {
    uint8_t bytes[wire::kWordSize];
    wire::encode(wire::WordMessage{nonce_, word, value}, bytes);
    on_line(bytes, sizeof(bytes));
  }

  void turn_line() {
    uint8_t bytes[4096];
    if (line_ < 0) return;
    const ssize_t n = read_now(line_, bytes, sizeof(bytes));
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
      printf("line: closed\n");
      ::close(std::exchange(line_, -1));
    }
    if (n <= 0) return;
    inbox_.insert(inbox_.end(), bytes, bytes + n);
    while (inbox_.size() >= sizeof(wire::HeaderWire)) {
      const auto head = wire::decode_line_head(inbox_.data(), inbox_.size());
      if (!head) fail("line: %s", head.error().reason);
      if (inbox_.size() < head->size) return;
      take_message(head->type, head->size);
      inbox_.erase(inbox_.begin(), inbox_.begin() + static_cast<long>(head->size));
    }
  }
  void take_message(wire::LineType type, size_t size) {
    if (type == wire::LineType::kOffer) {
      offer_ = wire::decode_offer(inbox_.data(), size).value();
      offered_ = true;
    } else if (type == wire::LineType::kWord) {
      const auto word = wire::decode_word(inbox_.data(), size).value();
      if (word.nonce != nonce_) return;
      heard_[word.word] = word.value;
      if (word.word == wire::Word::kStart) their_start_ = word.value;
    }
  }

  // --- the queue pair ---

  ibv_wc_status post(ibv_send_wr& entry) {
    entry.wr_id = 1;
    entry.send_flags |= IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    sent_status_.reset();
    if (ibv_post_send(pair_->id->qp, &entry, &bad) != 0) fail("ibv_post_send");
    const Patience patience("completion");
    while (!sent_status_) {
      turn_pair();
      if (!sent_status_) patience.wait();
    }
    return *sent_status_;
  }
  ibv_wc_status write(long offset, size_t from, size_t n, uint32_t key, uint32_t value) {
    ibv_sge data{reinterpret_cast<uint64_t>(pair_->out.data()) + from, static_cast<uint32_t>(n),
                 pair_->out_mr->lkey};
    ibv_send_wr entry{};
    entry.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    entry.send_flags = IBV_SEND_SOLICITED;
    entry.sg_list = &data;
    entry.num_sge = n != 0;
    entry.imm_data = htonl(value);
    entry.wr.rdma.remote_addr = theirs_.ring_address + static_cast<uint64_t>(offset);
    entry.wr.rdma.rkey = key != 0 ? key : theirs_.ring_key;
    return post(entry);
  }
  void turn_pair() {
    ibv_wc wc;
    while (pair_ && ibv_poll_cq(pair_->cq, 1, &wc) == 1) {
      if (wc.wr_id == 1) {
        sent_status_ = wc.status;
      } else if (wc.status == IBV_WC_SUCCESS) {
        pair_->post_receive();
        const uint32_t value = ntohl(wc.imm_data);
        if ((value & kCredit) == 0) arrived_ += value;
      }
    }
  }

  // --- bytes ---

  std::vector<uint8_t> next_bytes(size_t n) {
    std::vector<uint8_t> bytes(n);
    fill_known(bytes.data(), n, sent_);
    sent_ += n;
    return bytes;
  }
  /// [x, end) of what went by the ring, once more by TCP.
  void replay(uint64_t x) {
    if (x > put_)
      fail("frozen at %llu of %llu", static_cast<unsigned long long>(x),
           static_cast<unsigned long long>(put_));
    std::vector<uint8_t> bytes(put_ - x);
    fill_known(bytes.data(), bytes.size(), start_.value_or(0) + x);
    if (::send(tcp_, bytes.data(), bytes.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(bytes.size()))
      fail("replay");
    printf("replayed %zu\n", bytes.size());
  }
  void check(const uint8_t* bytes, size_t n) {
    if (differs_at(bytes, n, got_) != n)
      fail("wrong byte at %llu", static_cast<unsigned long long>(got_));
    got_ += n;
  }
  void turn() {
    turn_line();
    turn_pair();
    uint8_t bytes[kRing];
    while (their_start_ && got_ >= *their_start_ && got_ring_ < arrived_) {
      const size_t at = got_ring_ % kRing, n = std::min<size_t>(arrived_ - got_ring_, kRing - at);
      check(pair_->ring.data() + at, n);
      got_ring_ += n;
      uncredited_ += n;
    }
    const ssize_t n = read_now(tcp_, bytes, sizeof(bytes));
    if (n > 0) check(bytes, static_cast<size_t>(n));
    if (n == 0) fail("the server ended the connection");
    if (n < 0 && errno != EAGAIN) fail("recv: %s", strerrorname_np(errno));
  }
  void await_echo() {
    const Patience patience("echo");
    while (got_ < sent_) {
      turn();
      if (got_ < sent_) patience.wait();
    }
  }

  const char* const address_;
  const char* const from_;
  const int port_;
  Cm cm_;
  const int tcp_;
  wire::FourTuple tuple_;
  wire::Found found_;
  int line_ = -1;
  std::vector<uint8_t> inbox_;
  wire::Offer offer_;
  bool offered_ = false;
  uint64_t nonce_ = 0;
  std::optional<Pair> pair_;
  wire::Join theirs_;
  std::map<wire::Word, uint64_t> heard_;
  std::optional<ibv_wc_status> sent_status_;
  std::optional<uint64_t> start_, their_start_;
  bool honest_ = false, end_ok_said_ = false;
  uint64_t sent_ = 0, got_ = 0;      // of the stream
  uint64_t put_ = 0, got_ring_ = 0;  // by the ring
  uint64_t arrived_ = 0, uncredited_ = 0;
};

std::vector<std::string> words_of(const std::string& step) {
  std::vector<std::string> words(1);
  for (const char c : step) {
    if (c == ':') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  words.resize(5);
  return words;
}

void take(Peer& peer, const std::string& step) {
  const auto w = words_of(step);
  const auto number = [&](size_t i) {
    return static_cast<size_t>(strtoull(w[i].c_str(), nullptr, 0));
  };
  if (w[0] == "tcp") return peer.tcp(number(1));
  if (w[0] == "ask") return peer.ask();
  if (w[0] == "lift") return peer.lift();
  if (w[0] == "start") return peer.start();
  if (w[0] == "ready") return peer.ready();
  if (w[0] == "ring") return peer.ring(number(1));
  if (w[0] == "put") return peer.put(number(1));
  if (w[0] == "credit") return peer.credit();
  if (w[0] == "imm") return peer.immediate(static_cast<uint32_t>(number(1)));
  if (w[0] == "write")
    return peer.write_at(atol(w[1].c_str()), number(2), static_cast<uint32_t>(number(3)));
  if (w[0] == "read") return peer.read();
  if (w[0] == "word") return peer.word(w[1], w[2]);
  if (w[0] == "line") return peer.raw(w[1]);
  if (w[0] == "hear") return peer.hear(static_cast<wire::Word>(number(1)));
  if (w[0] == "settle") return peer.settle();
  if (w[0] == "join") return peer.join_again();
  if (w[0] == "want") return peer.want_again();
  if (w[0] == "drop_line") return peer.drop_line();
  if (w[0] == "drop_pair") return peer.drop_pair();
  if (w[0] == "fin") return peer.fin();
  if (w[0] == "close") return peer.close();
  if (w[0] == "over") return peer.over();
  if (w[0] == "nap") return pause_ms(static_cast<long>(number(1)));
  fail("no step %s", step.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const char* address = text_of(argc, argv, "address");
  const char* from = text_of(argc, argv, "from");
  const int port = static_cast<int>(number_of(argc, argv, "port", 0));
  if (address == nullptr || from == nullptr || port == 0) fail("usage");
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Peer peer(address, port, from);
  for (int i = 4; i < argc; ++i) take(peer, argv[i]);
  printf("done\n");
  fflush(stdout);
  _exit(0);  // as a process that is killed: nothing is said to anybody
}
