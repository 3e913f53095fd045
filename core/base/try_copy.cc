#include "core/base/try_copy.h"

#include <ucontext.h>

extern "C" {
/// Of a larger copy in this thread: the stack pointer at the call of memcpy.
constinit thread_local uintptr_t rsock_copy_sp
    __attribute__((tls_model("initial-exec"), visibility("hidden"))) = 0;
// Labels of the code below.
extern const char rsock_copy_begin[] __attribute__((visibility("hidden")));
extern const char rsock_copy_end[] __attribute__((visibility("hidden")));
extern const char rsock_copy_bad[] __attribute__((visibility("hidden")));
extern const char rsock_large_back[] __attribute__((visibility("hidden")));
extern const char rsock_large_bad[] __attribute__((visibility("hidden")));
}

#define RSOCK_FUNCTION(name)       \
  ".globl " name "\n.hidden " name \
  "\n"                             \
  ".type " name ", %function\n" name ":\n.cfi_startproc\n"
#define RSOCK_LABEL(name) ".globl " name "\n.hidden " name "\n" name ":\n"
#define RSOCK_END(name) ".cfi_endproc\n.size " name ", .-" name "\n"

// Sanitizers put a memcpy of their own in front, which is no leaf.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define RSOCK_COPY_BY_HAND 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define RSOCK_COPY_BY_HAND 1
#endif
#endif

#if defined(__x86_64__)
#if defined(RSOCK_COPY_BY_HAND)
#define RSOCK_LARGE "movq %rdx, %rcx\nrep movsb\nmovl $1, %eax\nret\n"
#else
#define RSOCK_LARGE "jmp rsock_large_copy\n"
#endif
// Up to 128 bytes by loads that overlap, all before the first store.
asm(".text\n.p2align 6\n" RSOCK_LABEL("rsock_copy_begin") RSOCK_FUNCTION("rsock_try_copy") R"(
  cmpq $64, %rdx
  ja 1f
  cmpq $32, %rdx
  jae 3f
  cmpq $16, %rdx
  jb 2f
  movups (%rsi), %xmm0
  movups -16(%rsi,%rdx), %xmm1
  movups %xmm0, (%rdi)
  movups %xmm1, -16(%rdi,%rdx)
  movl $1, %eax
  ret
3:
  movups (%rsi), %xmm0
  movups 16(%rsi), %xmm1
  movups -32(%rsi,%rdx), %xmm2
  movups -16(%rsi,%rdx), %xmm3
  movups %xmm0, (%rdi)
  movups %xmm1, 16(%rdi)
  movups %xmm2, -32(%rdi,%rdx)
  movups %xmm3, -16(%rdi,%rdx)
  movl $1, %eax
  ret
1:
  cmpq $128, %rdx
  ja 5f
  movups (%rsi), %xmm0
  movups 16(%rsi), %xmm1
  movups 32(%rsi), %xmm2
  movups 48(%rsi), %xmm3
  movups -64(%rsi,%rdx), %xmm4
  movups -48(%rsi,%rdx), %xmm5
  movups -32(%rsi,%rdx), %xmm6
  movups -16(%rsi,%rdx), %xmm7
  movups %xmm0, (%rdi)
  movups %xmm1, 16(%rdi)
  movups %xmm2, 32(%rdi)
  movups %xmm3, 48(%rdi)
  movups %xmm4, -64(%rdi,%rdx)
  movups %xmm5, -48(%rdi,%rdx)
  movups %xmm6, -32(%rdi,%rdx)
  movups %xmm7, -16(%rdi,%rdx)
  movl $1, %eax
  ret
2:
  cmpq $8, %rdx
  jb 3f
  movq (%rsi), %rax
  movq -8(%rsi,%rdx), %rcx
  movq %rax, (%rdi)
  movq %rcx, -8(%rdi,%rdx)
  movl $1, %eax
  ret
3:
  cmpq $4, %rdx
  jb 3f
  movl (%rsi), %eax
  movl -4(%rsi,%rdx), %ecx
  movl %eax, (%rdi)
  movl %ecx, -4(%rdi,%rdx)
  movl $1, %eax
  ret
3:
  testq %rdx, %rdx
  je 4f
  movq %rdx, %r9
  shrq $1, %r9
  movzbl (%rsi), %eax
  movzbl (%rsi,%r9), %r8d
  movzbl -1(%rsi,%rdx), %ecx
  movb %al, (%rdi)
  movb %r8b, (%rdi,%r9)
  movb %cl, -1(%rdi,%rdx)
4:
  movl $1, %eax
  ret
5:
)" RSOCK_LARGE RSOCK_END("rsock_try_copy") RSOCK_FUNCTION("rsock_try_read") R"(
  movb (%rdi), %al
  movl $1, %eax
  ret
)" RSOCK_END("rsock_try_read") RSOCK_FUNCTION("rsock_try_write") R"(
  lock orb $0, (%rdi)
  movl $1, %eax
  ret
)" RSOCK_END("rsock_try_write") RSOCK_LABEL("rsock_copy_end") RSOCK_LABEL("rsock_copy_bad") R"(
  xorl %eax, %eax
  ret
)" RSOCK_FUNCTION("rsock_large_copy") R"(
  movq rsock_copy_sp@gottpoff(%rip), %rax
  pushq %fs:(%rax)
  .cfi_adjust_cfa_offset 8
  movq %rsp, %fs:(%rax)
  call memcpy@PLT
)" RSOCK_LABEL("rsock_large_back") R"(
  movl $1, %eax
1:
  movq rsock_copy_sp@gottpoff(%rip), %rcx
  popq %fs:(%rcx)
  .cfi_adjust_cfa_offset -8
  ret
  .cfi_adjust_cfa_offset 8
)" RSOCK_LABEL("rsock_large_bad") R"(
  xorl %eax, %eax
  jmp 1b
)" RSOCK_END("rsock_large_copy"));
#elif defined(__aarch64__)
asm(".text\n.p2align 6\n" RSOCK_LABEL("rsock_copy_begin") RSOCK_FUNCTION("rsock_try_read") R"(
  ldrb w1, [x0]
  mov w0, 1
  ret
)" RSOCK_END("rsock_try_read") RSOCK_FUNCTION("rsock_try_write") R"(
1:
  ldxrb w1, [x0]
  stxrb w2, w1, [x0]
  cbnz w2, 1b
  mov w0, 1
  ret
)" RSOCK_END("rsock_try_write") RSOCK_LABEL("rsock_copy_end") RSOCK_LABEL("rsock_copy_bad") R"(
  mov w0, 0
  ret
)" RSOCK_FUNCTION("rsock_try_copy") R"(
  stp x29, x30, [sp, -32]!
  .cfi_def_cfa_offset 32
  .cfi_offset 29, -32
  .cfi_offset 30, -24
  mrs x3, tpidr_el0
  adrp x4, :gottprel:rsock_copy_sp
  ldr x4, [x4, :gottprel_lo12:rsock_copy_sp]
  add x3, x3, x4
  ldr x4, [x3]
  str x4, [sp, 16]
  mov x4, sp
  str x4, [x3]
  bl memcpy
)" RSOCK_LABEL("rsock_large_back") R"(
  mov w0, 1
1:
  mrs x3, tpidr_el0
  adrp x4, :gottprel:rsock_copy_sp
  ldr x4, [x4, :gottprel_lo12:rsock_copy_sp]
  add x3, x3, x4
  ldr x4, [sp, 16]
  str x4, [x3]
  ldp x29, x30, [sp], 32
  ret
)" RSOCK_LABEL("rsock_large_bad") R"(
  mov w0, 0
  b 1b
)" RSOCK_END("rsock_try_copy"));
#else
#error "librsock copies by hand on x86_64 and aarch64 only"
#endif

namespace rsock {
namespace {

constexpr uintptr_t kPage = 4096;

uintptr_t address(const char* label) noexcept { return reinterpret_cast<uintptr_t>(label); }

template <typename Touch>
bool every_page(const void* at, size_t n, Touch touch) noexcept {
  if (n == 0) return true;
  const auto first = reinterpret_cast<uintptr_t>(at);
  const uintptr_t last = first + (n - 1);
  if (last < first || !touch(first) || !touch(last)) return false;
  for (uintptr_t page = (first | (kPage - 1)) + 1; page != 0 && page <= last; page += kPage) {
    if (!touch(page)) return false;
  }
  return true;
}

}  // namespace

bool readable(const void* at, size_t n) noexcept {
  return every_page(at, n,
                    [](uintptr_t a) { return rsock_try_read(reinterpret_cast<const void*>(a)); });
}

bool writable(void* at, size_t n) noexcept {
  return every_page(at, n, [](uintptr_t a) { return rsock_try_write(reinterpret_cast<void*>(a)); });
}

bool recover_copy(void* context) noexcept {
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  auto& pc = machine.gregs[REG_RIP];
  auto& sp = machine.gregs[REG_RSP];
  constexpr uintptr_t kCall = 8;  // the return address
#else
  auto& pc = machine.pc;
  auto& sp = machine.sp;
  constexpr uintptr_t kCall = 0;
#endif
  const auto at = static_cast<uintptr_t>(pc);
  if (at >= address(rsock_copy_begin) && at < address(rsock_copy_end)) {
    pc = static_cast<decltype(pc + 0)>(address(rsock_copy_bad));
    return true;
  }
  const uintptr_t noted = rsock_copy_sp;
  const auto now = static_cast<uintptr_t>(sp);
  // memcpy is a leaf: it has saved nothing, so it has kept what is to be kept. One that puts
  // anything on the stack is not known, nor is a handler that came in between.
  if (noted == 0 || now != noted - kCall) return false;
#if defined(__x86_64__)
  // A note that siglongjmp left behind, out of a handler, is none: the call would be there.
  if (*reinterpret_cast<const uintptr_t*>(noted - kCall) != address(rsock_large_back)) return false;
  machine.gregs[REG_EFL] &= ~greg_t{0x400};  // "rep movsb" may have been at work downwards
#endif
  sp = static_cast<decltype(sp + 0)>(noted);
  pc = static_cast<decltype(pc + 0)>(address(rsock_large_bad));
  return true;
}

}  // namespace rsock
