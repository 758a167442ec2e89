//! A confusion matrix on a terminal.

use kolo_train::confusion::{ClassRow, Classification};

/// A matrix of more classes is told by its largest mistakes.
const SHOWN_CLASSES_MAX: usize = 12;
const SHOWN_MISTAKES_MAX: usize = 5;
/// Characters of a name in front of a row, and in a sentence.
const ROW_NAME_CHARS: usize = 18;
const NAME_CHARS: usize = 40;

/// Lines that show which class was taken for which.
pub fn lines(classification: &Classification) -> Vec<String> {
    let Some(matrix) = &classification.confusion else { return Vec::new() };
    if matrix.len() > SHOWN_CLASSES_MAX {
        return mistakes(matrix, &classification.classes).into_iter().collect();
    }
    let largest = matrix.iter().flatten().max().copied().unwrap_or(0).max(matrix.len() as i64 - 1);
    let width = largest.to_string().len() + 1;
    let cells =
        |values: &mut dyn Iterator<Item = i64>| values.map(|value| format!("{value:>width$}")).collect::<String>();
    let head = format!("  confusion   true \\ pred {}   recall", cells(&mut (0..matrix.len() as i64)));
    let row = |(row, class): (&Vec<i64>, &ClassRow)| {
        let label =
            name_of(class, ROW_NAME_CHARS).map_or(class.class.to_string(), |name| format!("{name} {}", class.class));
        format!("{label:>23}  {}   {:.4}", cells(&mut row.iter().copied()), class.recall)
    };
    let mut lines = vec![head];
    lines.extend(matrix.iter().zip(&classification.classes).map(row));
    let precisions = classification.classes.iter().map(|class| format!("{:.4}", class.precision));
    lines.push(format!("  by class    precision {}", precisions.collect::<Vec<_>>().join(" ")));
    lines
}

/// The name of a class, if it says more than its number, at most so many characters.
fn name_of(class: &ClassRow, characters: usize) -> Option<String> {
    let name = class.name.as_ref().filter(|name| **name != class.class.to_string())?;
    let name: String = name.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
    Some(match name.chars().count() > characters {
        true => name.chars().take(characters - 1).chain(['…']).collect(),
        false => name,
    })
}

fn mistakes(matrix: &[Vec<i64>], classes: &[ClassRow]) -> Option<String> {
    let pairs =
        matrix.iter().enumerate().flat_map(|(class, row)| row.iter().enumerate().map(move |cell| (class, cell)));
    let mut wrong: Vec<(i64, usize, usize)> = pairs
        .filter(|(class, (said, count))| class != said && **count > 0)
        .map(|(class, (said, count))| (-*count, class, said))
        .collect();
    wrong.sort_unstable();
    let name =
        |class: usize| classes.get(class).and_then(|row| name_of(row, NAME_CHARS)).unwrap_or_else(|| class.to_string());
    let shown = wrong.iter().take(SHOWN_MISTAKES_MAX);
    let shown = shown.map(|(count, class, said)| format!("{} as {} ({})", name(*class), name(*said), -count));
    let shown = shown.collect::<Vec<_>>().join(", ");
    (!shown.is_empty()).then(|| format!("  mistakes    {shown}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_train::confusion::Confusion;

    #[test]
    fn few_classes_are_a_matrix() {
        let shown = lines(&Confusion::new(vec![10, 2, 0, 4]).unwrap().report(None));
        let expected = [
            "  confusion   true \\ pred   0  1   recall",
            "                      0   10  2   0.8333",
            "                      1    0  4   1.0000",
            "  by class    precision 1.0000 0.6667",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn names_stand_in_front_of_the_numbers() {
        let names = ["cat", "a very long name indeed\n"].map(String::from);
        let shown = lines(&Confusion::new(vec![10, 2, 0, 4]).unwrap().report(Some(&names)));
        assert_eq!(shown[1], "                  cat 0   10  2   0.8333");
        assert_eq!(shown[2], "   a very long name … 1    0  4   1.0000");
        let numbers = ["0", "1"].map(String::from);
        let plain = Confusion::new(vec![10, 2, 0, 4]).unwrap();
        assert_eq!(lines(&plain.report(Some(&numbers))), lines(&plain.report(None)));
        let mut counts = vec![0; 400];
        counts[3] = 2;
        let names: Vec<String> = (0..20).map(|class| format!("kind {class}")).collect();
        assert_eq!(
            lines(&Confusion::new(counts).unwrap().report(Some(&names))),
            ["  mistakes    kind 0 as kind 3 (2)"]
        );
    }

    #[test]
    fn many_classes_are_their_largest_mistakes() {
        let mut counts = vec![0; 400];
        (counts[3], counts[20 * 7 + 2], counts[21]) = (1, 5, 9);
        let shown = lines(&Confusion::new(counts.clone()).unwrap().report(None));
        assert_eq!(shown, ["  mistakes    7 as 2 (5), 0 as 3 (1)"]);
        assert!(lines(&Confusion::new(vec![0; 400]).unwrap().report(None)).is_empty());
    }
}
