//! Which machine this is, and how this process stands on it.

/// How an environment variable is looked up.
pub type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What tells the running kernel from all others. Names of hosts would not: containers of one host have different ones, and
/// hosts made from one image may have the same.
pub fn kernel() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_string())
}

/// Whether this process was started with the signal ignored, as `nohup` does with hangups.
pub fn ignores_signal(signal: i32) -> bool {
    // SAFETY: a zeroed `sigaction` is a valid place for the answer.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks, and changes nothing.
    let answer = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
    answer == 0 && action.sa_sigaction == libc::SIG_IGN
}
