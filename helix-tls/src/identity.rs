//! The node that a certificate is for: a SAN URI `helix://cluster/NAME/node/ID`.

use std::fmt::{self, Display};

use crate::certificate::CertificateNames;

const SCHEME: &str = "helix://cluster/";

/// Longest name of a cluster in a certificate.
const CLUSTER_NAME_BYTES_MAX: usize = 64;

/// The node of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Name of the cluster.
    pub cluster: String,
    /// Id of the node in its cluster.
    pub node_id: u64,
}

impl Display for NodeIdentity {
    /// Formats the URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/node/{}", self.cluster, self.node_id)
    }
}

impl NodeIdentity {
    /// Parses a URI.
    fn parse(uri: &str) -> Option<Self> {
        let (cluster, node_id) = uri.strip_prefix(SCHEME)?.split_once("/node/")?;
        check_cluster_name(cluster).ok()?;
        let is_canonical = !node_id.starts_with(['0', '+']);
        let node_id = node_id.parse().ok().filter(|_| is_canonical)?;
        Some(Self { cluster: cluster.to_owned(), node_id })
    }

    /// Returns the node of a certificate.
    ///
    /// # Errors
    /// The certificate is not for exactly one node.
    pub fn of(names: &CertificateNames) -> Result<Self, String> {
        let mut nodes = names.uris.iter().filter_map(|uri| Self::parse(uri));
        match (nodes.next(), nodes.next()) {
            (Some(node), None) => Ok(node),
            (Some(_), Some(_)) => Err(format!("the certificate of {names} names several nodes")),
            (None, _) => Err(format!(
                "the certificate of {names} names no node; it needs a SAN URI \
                 {SCHEME}NAME/node/ID, as helix cert node writes it"
            )),
        }
    }

    /// Checks that this certificate is for a node of the cluster of `own`.
    ///
    /// # Errors
    /// It is for another cluster.
    pub fn check_cluster(&self, own: &Self) -> Result<(), String> {
        if self.cluster != own.cluster {
            return Err(format!(
                "its certificate is for node {} of cluster {:?}, and this node is in cluster {:?}",
                self.node_id, self.cluster, own.cluster
            ));
        }
        Ok(())
    }

    /// Checks that this certificate may speak as `node_id` to a node with the identity `own`.
    ///
    /// # Errors
    /// It is for another cluster or another node.
    pub fn check(&self, own: &Self, node_id: u64) -> Result<(), String> {
        self.check_cluster(own)?;
        if self.node_id != node_id {
            return Err(format!(
                "its certificate is for node {}, and it cannot be node {node_id}",
                self.node_id
            ));
        }
        Ok(())
    }
}

/// Checks that a certificate can have this name of a cluster.
///
/// # Errors
/// The characters that are allowed.
pub fn check_cluster_name(name: &str) -> Result<(), String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_valid = (1..=CLUSTER_NAME_BYTES_MAX).contains(&name.len());
    match is_valid && name.bytes().all(is_allowed) {
        true => Ok(()),
        false => Err(format!(
            "a cluster name in certificates has 1 to {CLUSTER_NAME_BYTES_MAX} ASCII letters, \
             digits, '-', '.' and '_'"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(uris: &[&str]) -> CertificateNames {
        let uris = uris.iter().map(|&uri| uri.to_owned()).collect();
        CertificateNames { uris, ..CertificateNames::default() }
    }

    #[test]
    fn parses_only_the_form_that_it_writes() {
        let node = NodeIdentity { cluster: "prod-1.eu".to_owned(), node_id: 12 };
        assert_eq!(node.to_string(), "helix://cluster/prod-1.eu/node/12");
        assert_eq!(NodeIdentity::of(&names(&[&node.to_string()])), Ok(node));
        for wrong in [
            "helix://cluster/prod/node/012",
            "helix://cluster/prod/node/+1",
            "helix://cluster/prod/node/1/",
            "helix://cluster/prod/node/",
            "helix://cluster/prod/node/99999999999999999999",
            "helix://cluster/a/b/node/1",
            "helix://cluster//node/1",
            "HELIX://cluster/prod/node/1",
            "https://cluster/prod/node/1",
            "",
        ] {
            let said = NodeIdentity::of(&names(&[wrong])).unwrap_err();
            assert!(said.contains("names no node"), "{wrong}: {said}");
        }
        let two = names(&["helix://cluster/a/node/1", "helix://cluster/a/node/2"]);
        assert!(NodeIdentity::of(&two).unwrap_err().contains("several"));
    }

    #[test]
    fn a_certificate_speaks_for_its_node_in_its_cluster_only() {
        let node = |cluster: &str, node_id| NodeIdentity { cluster: cluster.to_owned(), node_id };
        node("a", 2).check(&node("a", 1), 2).unwrap();
        assert!(node("a", 2).check(&node("a", 1), 3).unwrap_err().contains("cannot be node 3"));
        assert!(node("b", 2).check(&node("a", 1), 2).unwrap_err().contains("cluster \"b\""));
    }
}
