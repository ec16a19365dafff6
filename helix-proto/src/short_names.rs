//! Names of members in tables: the shortest beginnings of their ids that differ. Pure.

use std::collections::BTreeMap;

/// Fewest characters of a shortened id.
const CHARS_MIN: usize = 8;

/// Printed names of members, by id. An id without an entry is printed whole.
#[derive(Debug, Default)]
pub struct ShortNames(BTreeMap<String, String>);

impl ShortNames {
    /// Shortens ids so that they still differ from each other.
    pub fn of<'a>(ids: impl Iterator<Item = &'a str>) -> Self {
        let mut ids: Vec<&str> = ids.collect();
        ids.sort_unstable();
        // Two equal ids share all characters, so neither would be shortened.
        ids.dedup();
        let shared = |one: &str, other: &str| {
            one.chars().zip(other.chars()).take_while(|(one, other)| one == other).count()
        };
        let short = |(index, id): (usize, &&str)| {
            let before = index.checked_sub(1).and_then(|before| ids.get(before));
            let neighbours = before.into_iter().chain(ids.get(index + 1));
            let longest = neighbours.map(|other| shared(id, other)).max().unwrap_or(0);
            let name = id.chars().take(CHARS_MIN.max(longest + 1)).collect();
            ((*id).to_owned(), name)
        };
        Self(ids.iter().enumerate().map(short).collect())
    }

    /// Returns the name of a member.
    pub fn get<'a>(&'a self, id: &'a str) -> &'a str {
        self.0.get(id).map_or(id, String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_differ() {
        let ids = ["7d9c1f00-aaaa-1", "7d9c1f00-aaab-2", "m1", "0f3e5a77-1c2d-3"];
        let names = ShortNames::of(ids.into_iter());
        let printed: Vec<_> = ids.iter().map(|id| names.get(id)).collect();
        assert_eq!(printed, ["7d9c1f00-aaaa", "7d9c1f00-aaab", "m1", "0f3e5a77"]);
        assert_eq!(names.get("gone"), "gone");
        let twice = ShortNames::of([ids[3], ids[3]].into_iter());
        assert_eq!(twice.get(ids[3]), "0f3e5a77");
        assert_eq!(ShortNames::default().get(ids[0]), ids[0]);
    }
}
