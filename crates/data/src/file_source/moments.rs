//! Points in time as tables have them: numbers, or dates as ISO 8601 writes them.

use crate::record::RecordValue;

/// Days of the calendar before 1970, and of 400 years.
const DAYS_TO_1970: i64 = 719_468;
const DAYS_OF_ERA: i64 = 146_097;

/// A point in time as a number that grows with it: of a date, seconds since 1970.
pub(crate) fn moment(value: &RecordValue) -> Option<f64> {
    match value {
        RecordValue::Ints(values) if values.len() == 1 => Some(values[0] as f64),
        RecordValue::Reals(values) if values.len() == 1 && values[0].is_finite() => Some(f64::from(values[0])),
        RecordValue::Text(text) => seconds(text.trim()).or_else(|| text.trim().parse().ok()),
        _ => None,
    }
}

/// `2024-02-29`, `2024-02`, `2024-02-29 13:05`, `2024-02-29T13:05:30.5Z`: an offset from UTC is not looked at, as all rows have
/// the same.
fn seconds(text: &str) -> Option<f64> {
    let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, ""));
    let mut parts = date.split('-');
    let year: i64 = parts.next().filter(|year| year.len() == 4)?.parse().ok()?;
    let month: i64 = parts.next()?.parse().ok().filter(|month| (1..=12).contains(month))?;
    let day: i64 = parts.next().map_or(Some(1), |day| day.parse().ok()).filter(|day| (1..=31).contains(day))?;
    if parts.next().is_some() {
        return None;
    }
    let time = time.split(['+', 'Z', '-']).next().unwrap_or_default();
    let mut total = 0.0;
    for (unit, part) in [3600.0, 60.0, 1.0].into_iter().zip(time.split(':').filter(|part| !part.is_empty())) {
        total += unit * part.parse::<f64>().ok()?;
    }
    Some(days_since_1970(year, month, day) as f64 * 86_400.0 + total)
}

/// Of the Gregorian calendar, by eras of 400 years that begin in March.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * DAYS_OF_ERA + of_era * 365 + of_era / 4 - of_era / 100 + of_year - DAYS_TO_1970
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_numbers_are_moments() {
        let text = |text: &str| moment(&RecordValue::Text(text.into()));
        assert_eq!(text("1970-01-01"), Some(0.0));
        assert_eq!(text("2024-02-29T13:05:30Z"), Some(1_709_211_930.0));
        assert_eq!(text("2024-03-01 00:00"), Some(1_709_251_200.0));
        assert_eq!(text("1999-12"), Some(944_006_400.0));
        assert_eq!((text("17.5"), text("tomorrow"), text("2024-13-01")), (Some(17.5), None, None));
        assert_eq!(moment(&RecordValue::Ints(vec![1_709_211_930])), Some(1_709_211_930.0));
        assert_eq!(moment(&RecordValue::Missing), None);
    }
}
