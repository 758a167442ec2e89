//! What the process used of the machine, and figures written for people.

use std::time::Duration;

/// The most memory the process ever had resident, without what other workers of this host have and it maps: that counts where it was
/// made. `None` where the system has no `/proc`.
pub fn peak_rss_bytes() -> Option<u64> {
    let peak = high_water_mark(&std::fs::read_to_string("/proc/self/status").ok()?)?;
    Some(peak.saturating_sub(kolo_comm::shm::resident_bytes_of_peers()))
}

fn high_water_mark(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// `512 B`, `1.50 KiB`, `12.3 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// `999`, `1.23 k`, `124 M`.
pub fn format_count(count: u64) -> String {
    scaled(count, 1000.0, &["", "k", "M", "G", "T", "P", "E"]).trim_end().into()
}

/// `850 µs`, `12.3 ms`, `4.56 s`, `2 min 05 s`, `3 h 07 min`, `2 d 03 h`.
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let whole = seconds.round() as u64;
    match seconds {
        _ if seconds < 999.5e-6 => format!("{:.0} µs", seconds * 1e6),
        _ if seconds < 0.9995 => format!("{} ms", three_digits(seconds * 1e3)),
        _ if seconds < 59.95 => format!("{} s", three_digits(seconds)),
        _ if whole < 3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ if whole < 86_400 => format!("{} h {:02} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {:02} h", whole / 86_400, whole / 3600 % 24),
    }
}

fn scaled(value: u64, base: f64, units: &[&str]) -> String {
    if (value as f64) < base {
        return format!("{value} {}", units[0]);
    }
    let mut scaled = value as f64;
    let mut unit = 0;
    // What would be rounded up to the base belongs to the next unit.
    while scaled >= base - 0.5 && unit + 1 < units.len() {
        scaled /= base;
        unit += 1;
    }
    format!("{} {}", three_digits(scaled), units[unit])
}

/// Three significant digits, without an exponent.
fn three_digits(value: f64) -> String {
    match value {
        _ if value < 9.995 => format!("{value:.2}"),
        _ if value < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Gives free memory of the allocator back to the system. What it took to plan a step, several graphs of it, is not needed
/// again, and would count beside what the step takes.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes nothing from anybody who has it.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// How much nicer a thread is than those that compute: beside them it gets about a tenth of a core.
#[cfg(target_os = "linux")]
const BACKGROUND_NICE: libc::c_int = 10;

/// Lets threads that compute go before this one, for as long as it lives.
pub fn lower_priority() {
    #[cfg(target_os = "linux")]
    // SAFETY: takes three numbers; on Linux it concerns the calling thread alone. If the system refuses, the priority stays.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, BACKGROUND_NICE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_high_water_mark() {
        let status = "Name:\tkolo\nVmPeak:\t  999 kB\nVmHWM:\t    1234 kB\nThreads:\t2\n";
        assert_eq!(high_water_mark(status), Some(1234 * 1024));
        assert_eq!(high_water_mark("Name:\tkolo\n"), None);
        assert_eq!(high_water_mark("VmHWM: many kB\n"), None);
        if cfg!(target_os = "linux") {
            assert!(peak_rss_bytes().unwrap() > 64 * 1024);
        }
    }

    #[test]
    fn bytes_for_people() {
        let shown = [0, 1023, 1024, 1536, 12_897_484_800, (1 << 20) - 1, u64::MAX].map(format_bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "12.0 GiB", "1.00 MiB", "16.0 EiB"]);
    }

    #[test]
    fn counts_for_people() {
        let shown = [0, 999, 1000, 1234, 9_999, 123_900_000, 999_950, 1_234_567].map(format_count);
        assert_eq!(shown, ["0", "999", "1.00 k", "1.23 k", "10.0 k", "124 M", "1.00 M", "1.23 M"]);
    }

    #[test]
    fn durations_for_people() {
        let shown = |microseconds: u64| format_duration(Duration::from_micros(microseconds));
        assert_eq!([0, 850, 1000, 12_345].map(shown), ["0 µs", "850 µs", "1.00 ms", "12.3 ms"]);
        assert_eq!([999_900, 4_560_000, 59_980_000].map(shown), ["1.00 s", "4.56 s", "1 min 00 s"]);
        let long = [125, 3599, 11_220, 183_600].map(|seconds| shown(seconds * 1_000_000));
        assert_eq!(long, ["2 min 05 s", "59 min 59 s", "3 h 07 min", "2 d 03 h"]);
    }
}
