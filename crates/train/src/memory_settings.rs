//! `[memory]` of a job: what is computed again, what a GPU leaves to the host, and how much a worker may take.

use kolo_exec::Offload;
use kolo_graph::settings::{Setting, SettingError, Settings};
use kolo_parallel::RecomputePlan;

/// What `[memory]` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemorySettings {
    pub recompute: RecomputePlan,
    /// What a device with memory of its own leaves in the host's.
    pub offload: Offload,
    /// Bytes that each worker may take by its plan: of the memory that its device computes in.
    pub limit_bytes: Option<u64>,
}

impl MemorySettings {
    pub fn read(memory: &Settings) -> Result<Self, SettingError> {
        let recompute = RecomputePlan::read(memory)?;
        let offload = Offload::named(memory.choice("offload", &Offload::NAMES)?).unwrap_or_default();
        let limit_bytes = match memory.peek("limit") {
            Some(Setting::Int(bytes @ ..1)) => {
                return Err(memory.wrong("limit", format!("must be at least 1, but is {bytes}"), SIZE_HINT));
            }
            Some(Setting::Int(_)) => Some(memory.count("limit", 1, 1)? as u64),
            Some(Setting::Text(_)) => {
                let text = memory.text("limit", "")?;
                Some(parse_bytes(&text).map_err(|why| memory.wrong("limit", why, SIZE_HINT))?)
            }
            Some(_) => return Err(memory.wrong("limit", "is not a size", SIZE_HINT)),
            None => {
                memory.text("limit", "")?;
                None
            }
        };
        memory.finish()?;
        Ok(Self { recompute, offload, limit_bytes })
    }
}

const SIZE_HINT: &str = "write a number of bytes, or one with a unit, such as \"2GiB\", \"512MiB\" or \"2GB\"";

/// Units of sizes, with their bytes.
const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// `2GiB`, `1.5 GiB`, `512MiB`, `2GB`, `2147483648`: whole bytes above 0.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (number, unit) = (text[..digits].replace('_', ""), text[digits..].trim());
    let unit = if unit.is_empty() { "B" } else { unit };
    let Some((_, factor)) = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) else {
        let units: Vec<&str> = UNITS.iter().map(|(name, _)| *name).collect();
        return Err(format!("is \"{text}\", but `{unit}` is not a unit; the units are {}", units.join(", ")));
    };
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(*factor),
        Err(_) => number.parse::<f64>().ok().map(|part| part * *factor as f64).filter(|b| *b < 1e18).map(|b| b as u64),
    };
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| format!("is \"{text}\", which is not a number of bytes above 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(value: Setting) -> Result<Option<u64>, String> {
        let mut memory = Settings::new("memory", "job.toml:3");
        memory.set("limit", "job.toml:4", value);
        MemorySettings::read(&memory).map(|memory| memory.limit_bytes).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_have_units() {
        let text = |text: &str| limit(Setting::Text(text.into())).unwrap().unwrap();
        let sizes = ["2GiB", "1.5 GiB", "512MiB", "2GB", "2147483648", "64 kib", "1_000 B"].map(text);
        assert_eq!(
            sizes,
            [2 << 30, 3 << 29, 512 << 20, 2_000_000_000, 2_147_483_648, 64 << 10, 1000],
            "powers of two with an i, of ten without"
        );
        assert_eq!(limit(Setting::Int(4096)), Ok(Some(4096)));
        assert_eq!(MemorySettings::read(&Settings::new("memory", "job.toml:3")), Ok(MemorySettings::default()));
    }

    #[test]
    fn wrong_sizes_are_explained() {
        let refused = |value: Setting| limit(value).unwrap_err();
        assert_eq!(
            refused(Setting::Text("2GiG".into())),
            format!(
                "job.toml:4: `memory.limit` is \"2GiG\", but `GiG` is not a unit; the units are \
                 B, KiB, MiB, GiB, TiB, kB, MB, GB, TB\n  hint: {SIZE_HINT}"
            )
        );
        for text in ["", "GiB", "0", "-1GiB", "1.2.3GiB", "99999999999 TiB", "1e400 B", "0.1B", "∞GiB"] {
            let message = refused(Setting::Text(text.into()));
            assert!(message.contains("`memory.limit` is"), "{message}");
        }
        assert!(refused(Setting::Int(0)).contains("must be at least 1, but is 0"));
        assert!(refused(Setting::Bool(true)).contains("`memory.limit` is not a size"));
        let mut memory = Settings::new("memory", "job.toml:3");
        memory.set("recompute", "job.toml:4", Setting::Text("block".into()));
        let message = MemorySettings::read(&memory).unwrap_err().to_string();
        assert!(message.contains("did you mean \"blocks\"? The choices are none, blocks, selective"), "{message}");
        let mut memory = Settings::new("memory", "job.toml:3");
        let layers = memory.table_mut("layers", "job.toml:4").unwrap();
        layers.set("h.{0-3}", "job.toml:5", Setting::Text("block".into()));
        let message = MemorySettings::read(&memory).unwrap_err().to_string();
        assert!(message.starts_with("job.toml:5: `memory.layers.h.{0-3}` is \"block\""), "{message}");
    }
}
