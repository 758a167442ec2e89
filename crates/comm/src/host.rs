//! Which machine this is.

/// What tells the running kernel from all others. Names of hosts would not: containers of one host have different ones, and
/// hosts made from one image may have the same.
pub fn kernel() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_string())
}
