//! Cleanup policies of topics: their names on the command line and in results.

use helix_proto::log::v1::CleanupPolicy;

const POLICIES: [(&str, CleanupPolicy); 3] = [
    ("delete", CleanupPolicy::Delete),
    ("compact", CleanupPolicy::Compact),
    ("compact+delete", CleanupPolicy::CompactAndDelete),
];

/// Parses the cleanup policy of a topic.
pub(crate) fn parse_cleanup(text: &str) -> Result<CleanupPolicy, String> {
    let known = POLICIES.into_iter().find(|(name, _)| *name == text);
    let unknown = || "use delete, compact or compact+delete".to_owned();
    known.map(|(_, policy)| policy).ok_or_else(unknown)
}

/// Returns the name of a cleanup policy. Servers before compaction by key report none, and delete.
pub(crate) fn cleanup_name(policy: CleanupPolicy) -> &'static str {
    let known = POLICIES.into_iter().find(|(_, known)| *known == policy);
    known.map_or("delete", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cleanup_policies_round_trip() {
        for (name, policy) in POLICIES {
            assert_eq!(parse_cleanup(name), Ok(policy));
            assert_eq!(cleanup_name(policy), name);
        }
        assert!(parse_cleanup("both").is_err());
        assert_eq!(cleanup_name(CleanupPolicy::Unspecified), "delete");
    }
}
