//! Public type names are unique over all crates of the repository.

use std::collections::BTreeMap;

use super::source::{expect_none, sources};

/// Names that every crate may have, by convention.
const CONVENTIONAL: [&str; 2] = ["Error", "Result"];

#[test]
fn public_type_names_are_unique() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources() {
        let mut names = source.public_types();
        // One file may have alternatives of a type for different configurations.
        names.sort_by(|a, b| a.1.cmp(&b.1));
        names.dedup_by(|a, b| a.1 == b.1);
        for (line, name) in names {
            places.entry(name).or_default().push(format!("{}:{line}", source.path));
        }
    }
    let violations = places
        .into_iter()
        .filter(|(name, places)| places.len() > 1 && !CONVENTIONAL.contains(&name.as_str()))
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect();
    expect_none("a public type name is used once in the repository", violations);
}
