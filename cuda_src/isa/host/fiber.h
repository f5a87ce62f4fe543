// A fiber is one GPU thread: a stack of its own and a dozen saved registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define HFC_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HFC_ADDRESS_SANITIZER 1
#endif
#endif

#ifdef HFC_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && !defined(_WIN32)
// Callee-saved registers of the System V ABI; rdi = where to keep this stack pointer, rsi = the one to go on with.
asm(R"(
.text
.local hfc_switch_stack
.type hfc_switch_stack, @function
hfc_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size hfc_switch_stack, .-hfc_switch_stack
)");
#elif defined(__aarch64__) && !defined(_WIN32)
asm(R"(
.text
.local hfc_switch_stack
.type hfc_switch_stack, %function
hfc_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size hfc_switch_stack, .-hfc_switch_stack
)");
#else
#error "The host kernels know x86-64 and AArch64 with the System V calling convention."
#endif

extern "C" void hfc_switch_stack(void** save, void* load) asm("hfc_switch_stack");

namespace hfc::host {

class Fiber {
 public:
  using Entry = void (*)();

  // Prepares the fiber to run `entry` on `stack`, which must never return.
  void prepare(char* stack, std::size_t bytes, Entry entry) {
    bottom_ = stack;
    bytes_ = bytes;
#ifdef HFC_ADDRESS_SANITIZER
    __asan_unpoison_memory_region(stack, bytes);  // frames of the fiber before, which never returned
#endif
    auto top = reinterpret_cast<std::uintptr_t>(stack + bytes) & ~std::uintptr_t(15);
    auto* frame = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
    *--frame = nullptr;  // the return address that entry never uses keeps the stack aligned as after a call
    *--frame = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--frame = nullptr;
#else
    frame -= 20;
    for (int i = 0; i < 20; ++i) frame[i] = nullptr;
    frame[11] = reinterpret_cast<void*>(entry);  // x30, where `ret` goes
#endif
    pointer_ = frame;
  }

  // Leaves `from` (its state is kept there) and goes on with `to`. `last` = `from` never runs again.
  static void switch_to(Fiber& from, Fiber& to, bool last = false) {
#ifdef HFC_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack_, to.bottom_, to.bytes_);
#endif
    hfc_switch_stack(&from.pointer_, to.pointer_);
#ifdef HFC_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
#endif
    (void)last;
  }

  // The first thing a fiber does.
  static void started() {
#ifdef HFC_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  }

  // For the thread's own stack, which the sanitizer must know to come back to.
  void adopt(const void* bottom, std::size_t bytes) {
    bottom_ = bottom;
    bytes_ = bytes;
  }

 private:
  void* pointer_ = nullptr;
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
};

}  // namespace hfc::host
