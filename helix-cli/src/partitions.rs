//! Lists of partitions on the command line: `1-3,7`.

use std::ops::Deref;
use std::str::FromStr;

/// Highest number of partitions of a topic.
const PARTITIONS_MAX: usize = 100_000;

/// Partitions in the given order, each once. An empty list stands for all partitions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PartitionList(Vec<u32>);

impl Deref for PartitionList {
    type Target = Vec<u32>;

    fn deref(&self) -> &Vec<u32> {
        &self.0
    }
}

impl FromStr for PartitionList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut partitions = Vec::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let invalid = || format!("invalid partitions {part:?}; use numbers and ranges: 1-3,7");
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| invalid());
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if last < first {
                return Err(format!("the range {part:?} ends before it starts"));
            }
            if (last - first) as usize + partitions.len() >= PARTITIONS_MAX {
                return Err(format!("{text:?} has over {PARTITIONS_MAX} partitions"));
            }
            partitions.extend(first..=last);
        }
        let mut seen = std::collections::BTreeSet::new();
        partitions.retain(|partition| seen.insert(*partition));
        Ok(Self(partitions))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_numbers_and_ranges() {
        let parsed = |text: &str| text.parse::<PartitionList>().map(|list| list.0);
        assert_eq!(parsed("1-3,7"), Ok(vec![1, 2, 3, 7]));
        assert_eq!(parsed("2,0,2"), Ok(vec![2, 0]));
        assert_eq!(parsed(""), Ok(vec![]));
        for text in ["3-1", "a", "1-", "-1", "1,,2", "0-4294967295"] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }
}
