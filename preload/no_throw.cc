// The library throws nothing, and pays for nothing that throwing would need.
//
// Frames of ours are unwound (pthread_cancel), so libstdc++'s personality routine is linked in. Two
// things would come with it into every program of the user, and the definitions below stand in for
// both. First, a reserve of 72 KB that libstdc++ takes from malloc while it loads (eh_alloc.cc),
// and a demangler for the last words of a thrown object. Second, libgcc_s.so.1: a third of a
// millisecond to load and relocate. Whoever unwinds through us has it loaded already (glibc does,
// in pthread_cancel), so its functions are looked up when they are called. A private copy would be
// wrong: it would read the other one's private structures.
#include <dlfcn.h>
#include <unwind.h>

#include <cstddef>
#include <cstdlib>

namespace {

template <typename Fn>
Fn unwinder(const char* name) noexcept {
  static void* library = nullptr;  // the same value from every thread; a word is stored whole
  void* handle = __atomic_load_n(&library, __ATOMIC_RELAXED);
  if (handle == nullptr) {
    handle = dlopen("libgcc_s.so.1", RTLD_LAZY);
    __atomic_store_n(&library, handle, __ATOMIC_RELAXED);
  }
  void* found = handle != nullptr ? dlsym(handle, name) : nullptr;
  if (found == nullptr) abort();
  return reinterpret_cast<Fn>(found);
}

}  // namespace

#define RSOCK_UNWINDER(name) unwinder<decltype(&name)>(#name)

extern "C" {

_Unwind_Word _Unwind_GetIPInfo(_Unwind_Context* context, int* before) {
  return RSOCK_UNWINDER(_Unwind_GetIPInfo)(context, before);
}
void* _Unwind_GetLanguageSpecificData(_Unwind_Context* context) {
  return RSOCK_UNWINDER(_Unwind_GetLanguageSpecificData)(context);
}
_Unwind_Ptr _Unwind_GetRegionStart(_Unwind_Context* context) {
  return RSOCK_UNWINDER(_Unwind_GetRegionStart)(context);
}
_Unwind_Ptr _Unwind_GetDataRelBase(_Unwind_Context* context) {
  return RSOCK_UNWINDER(_Unwind_GetDataRelBase)(context);
}
_Unwind_Ptr _Unwind_GetTextRelBase(_Unwind_Context* context) {
  return RSOCK_UNWINDER(_Unwind_GetTextRelBase)(context);
}
void _Unwind_SetGR(_Unwind_Context* context, int index, _Unwind_Word value) {
  RSOCK_UNWINDER(_Unwind_SetGR)(context, index, value);
}
void _Unwind_SetIP(_Unwind_Context* context, _Unwind_Ptr value) {
  RSOCK_UNWINDER(_Unwind_SetIP)(context, value);
}
void _Unwind_Resume(_Unwind_Exception* exception) {
  RSOCK_UNWINDER(_Unwind_Resume)(exception);
  abort();
}
void _Unwind_DeleteException(_Unwind_Exception* exception) {
  RSOCK_UNWINDER(_Unwind_DeleteException)(exception);
}
_Unwind_Reason_Code _Unwind_RaiseException(_Unwind_Exception*) { abort(); }
_Unwind_Reason_Code _Unwind_Resume_or_Rethrow(_Unwind_Exception*) { abort(); }

void* __cxa_allocate_exception(size_t) noexcept { abort(); }
void __cxa_free_exception(void*) noexcept {}
void* __cxa_allocate_dependent_exception() noexcept { abort(); }
void __cxa_free_dependent_exception(void*) noexcept {}

}  // extern "C"

namespace __gnu_cxx {
void __verbose_terminate_handler() { abort(); }
}  // namespace __gnu_cxx
