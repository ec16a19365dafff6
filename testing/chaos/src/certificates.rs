//! Certificates of the nodes of a run with TLS.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use helix_tls::issue::{CertificateAuthority, IssuedPair};

use crate::cluster::NODES_MAX;

const DAYS: u32 = 30;

/// Returns the directory of the certificates of a run.
pub(crate) fn directory(run: &Path) -> PathBuf {
    run.join("tls")
}

/// Makes a CA and a certificate for each node that a run may have.
pub(crate) fn make(directory: &Path) -> anyhow::Result<()> {
    create_directory(directory)?;
    let issued = |pair: Result<IssuedPair, String>| pair.map_err(|what| anyhow!(what));
    let ca = issued(CertificateAuthority::create("chaos", DAYS))?;
    write(directory, "ca", &ca)?;
    let ca = CertificateAuthority::open(&ca.certificate, &ca.key).map_err(|what| anyhow!(what))?;
    for node in 1..=NODES_MAX {
        let pair = issued(ca.node(node, &["127.0.0.1".to_owned()], DAYS))?;
        write(directory, &format!("node-{node}"), &pair)?;
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "certificates belong to no log")]
fn create_directory(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory).context("create the directory of the certificates")
}

#[expect(clippy::disallowed_methods, reason = "certificates belong to no log")]
fn write(directory: &Path, name: &str, pair: &IssuedPair) -> anyhow::Result<()> {
    for (suffix, text) in [("pem", &pair.certificate), ("key", &pair.key)] {
        let path = directory.join(format!("{name}.{suffix}"));
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
