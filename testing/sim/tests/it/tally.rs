//! Counts of runs, printed and read again.

use std::collections::BTreeMap;

use helix_sim::coverage::CoverageMark;
use helix_sim::tally::Tally;

#[test]
fn printed_tally_parses_and_merges() {
    let one = Tally::new(BTreeMap::from([("mark Purge".to_owned(), 2), ("runs".to_owned(), 1)]));
    let (mut read, text) = Tally::parse(&format!("{one}and so on\ntally nothing\n"));
    assert_eq!((&read, text.as_str()), (&one, "and so on tally nothing"));
    read.merge(&one);
    assert_eq!((read.get("runs"), read.get("mark Purge")), (2, 4));
    assert!(
        !read.missing().contains(&CoverageMark::Purge)
            && read.missing().contains(&CoverageMark::Trimmed)
    );
}
