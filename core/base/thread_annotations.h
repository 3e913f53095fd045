// Clang's thread safety analysis, spelt once. Under g++ every macro is empty.
#pragma once

#if defined(__clang__)
#define RSOCK_TSA(x) __attribute__((x))
#else
#define RSOCK_TSA(x)
#endif

#define RSOCK_CAPABILITY(x) RSOCK_TSA(capability(x))
#define RSOCK_SCOPED_CAPABILITY RSOCK_TSA(scoped_lockable)
#define RSOCK_GUARDED_BY(x) RSOCK_TSA(guarded_by(x))
#define RSOCK_PT_GUARDED_BY(x) RSOCK_TSA(pt_guarded_by(x))
#define RSOCK_REQUIRES(...) RSOCK_TSA(requires_capability(__VA_ARGS__))
#define RSOCK_EXCLUDES(...) RSOCK_TSA(locks_excluded(__VA_ARGS__))
#define RSOCK_ACQUIRE(...) RSOCK_TSA(acquire_capability(__VA_ARGS__))
#define RSOCK_RELEASE(...) RSOCK_TSA(release_capability(__VA_ARGS__))
#define RSOCK_TRY_ACQUIRE(...) RSOCK_TSA(try_acquire_capability(__VA_ARGS__))
#define RSOCK_NO_TSA RSOCK_TSA(no_thread_safety_analysis)
