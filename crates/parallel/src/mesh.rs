//! The ranks arranged along named axes.

/// Axes with their sizes, outermost first. Rank numbers run fastest along the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<(String, usize)>,
    rank: usize,
}

/// The axis along which the batch is cut.
pub const DATA: &str = "data";

impl Mesh {
    /// A mesh and this rank's place in it; `None` if the rank is outside.
    pub fn new(axes: &[(&str, usize)], rank: usize) -> Option<Self> {
        let ranks: usize = axes.iter().map(|(_, size)| size).product();
        (rank < ranks).then(|| Self { axes: axes.iter().map(|(name, size)| (name.to_string(), *size)).collect(), rank })
    }

    /// All ranks along the data axis.
    pub fn data(ranks: usize, rank: usize) -> Option<Self> {
        Self::new(&[(DATA, ranks)], rank)
    }

    /// A mesh of one rank.
    pub fn alone() -> Self {
        Self { axes: vec![(DATA.into(), 1)], rank: 0 }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// The axes with their sizes, outermost first.
    pub fn axes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.axes.iter().map(|(name, size)| (name.as_str(), *size))
    }

    /// The size of an axis; one if there is no such axis.
    pub fn size(&self, axis: &str) -> usize {
        self.axes.iter().find(|(name, _)| name == axis).map_or(1, |(_, size)| *size)
    }

    /// The ranks that share this one's place along an axis.
    pub fn without(&self, axis: &str) -> Self {
        let axes = self.axes.iter().filter(|(name, _)| name != axis).cloned().collect();
        Self { axes, rank: self.group(axis) }
    }

    /// The number of this rank's group along an axis: all ranks that differ in that coordinate alone have the same.
    pub fn group(&self, axis: &str) -> usize {
        let others = self.axes.iter().filter(|(name, _)| name != axis);
        others.fold(0, |group, (name, size)| group * size + self.coordinate(name))
    }

    /// This rank's place along an axis.
    pub fn coordinate(&self, axis: &str) -> usize {
        let mut rest = self.rank;
        for (name, size) in self.axes.iter().rev() {
            if name == axis {
                return rest % size;
            }
            rest /= size;
        }
        0
    }
}

/// `2 data × 2 pipeline × 2 tensor`.
impl std::fmt::Display for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let axes: Vec<String> = self.axes.iter().map(|(name, size)| format!("{size} {name}")).collect();
        f.write_str(&axes.join(" × "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_run_fastest_along_the_last_axis() {
        let place = |rank| {
            let mesh = Mesh::new(&[("data", 2), ("tensor", 3)], rank).unwrap();
            (mesh.coordinate("data"), mesh.coordinate("tensor"), mesh.coordinate("pipeline"))
        };
        assert_eq!(
            (0..6).map(place).collect::<Vec<_>>(),
            [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0)]
        );
        assert_eq!(Mesh::data(2, 2), None);
    }
}
