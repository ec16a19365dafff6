//! `helix cert`: makes the certificates of a cluster. Connects to no cluster.
//! Never overwrites a file. Only the user can read the keys.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use helix_tls::issue::{CertificateAuthority, IssuedPair};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{CaArgs, CertSubcommand, ClientCertArgs, GlobalArgs, NodeCertArgs};
use crate::exit::{CliError, Exit};
use crate::files;
use crate::output::Output;

/// The files of a new certificate.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CertificateFilesRow {
    /// Certificate
    certificate: PathBuf,
    /// Private key, secret
    key: PathBuf,
}

pub(crate) fn run(global: &GlobalArgs, command: &CertSubcommand) -> anyhow::Result<()> {
    let row = match command {
        CertSubcommand::Ca(CaArgs { cluster, days, dir }) => {
            let pair = CertificateAuthority::create(cluster, *days).map_err(usage)?;
            write(dir, "ca", &pair)?
        }
        CertSubcommand::Node(NodeCertArgs { node, hosts, issue }) => {
            let pair = open(&issue.ca_dir)?.node(*node, hosts, issue.days).map_err(usage)?;
            write(&issue.dir, &format!("node-{node}"), &pair)?
        }
        CertSubcommand::Client(ClientCertArgs { name, issue }) => {
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            if !name.chars().all(is_name) {
                return Err(usage(format!(
                    "invalid name {name:?}; use letters, digits, '.', '_' and '-'"
                )));
            }
            let pair = open(&issue.ca_dir)?.client(name, issue.days).map_err(usage)?;
            write(&issue.dir, &format!("client-{name}"), &pair)?
        }
    };
    Output { format: global.output }.show(&vec![row])
}

/// Makes the CA, the certificates of the nodes and that of a client of a dev cluster, unless the
/// directory has them.
///
/// # Errors
/// Fails if a file cannot be written, or if the directory has only some of them.
pub(crate) fn make_dev_certificates(directory: &Path, nodes: u64) -> anyhow::Result<()> {
    files::create_private_directory(directory)
        .with_context(|| format!("create {}", directory.display()))?;
    if !directory.join("ca.pem").exists() {
        write(directory, "ca", &CertificateAuthority::create("dev", 365).map_err(usage)?)?;
    }
    let ca = open(directory)?;
    let hosts = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    for node in 1..=nodes {
        let name = format!("node-{node}");
        if !directory.join(format!("{name}.pem")).exists() {
            write(directory, &name, &ca.node(node, &hosts, 365).map_err(usage)?)?;
        }
    }
    if !directory.join("client-dev.pem").exists() {
        write(directory, "client-dev", &ca.client("dev", 365).map_err(usage)?)?;
    }
    Ok(())
}

fn usage(what: String) -> anyhow::Error {
    CliError::new(Exit::Usage, what).into()
}

fn open(directory: &Path) -> anyhow::Result<CertificateAuthority> {
    let read = |name: &str| {
        let path = directory.join(name);
        let text = files::read_text(&path).with_context(|| format!("read {}", path.display()))?;
        text.ok_or_else(|| {
            let failure = CliError::new(Exit::NotFound, format!("there is no {}", path.display()));
            anyhow::Error::from(failure.hint("helix cert ca --cluster NAME\n--ca-dir DIR"))
        })
    };
    let (certificate, key) = (read("ca.pem")?, read("ca.key")?);
    let opened = CertificateAuthority::open(&certificate, &key);
    opened.map_err(|what| CliError::new(Exit::Error, what).into())
}

/// Writes a certificate and its key. The key comes first: a certificate without its key is useless.
fn write(directory: &Path, name: &str, pair: &IssuedPair) -> anyhow::Result<CertificateFilesRow> {
    let certificate = directory.join(format!("{name}.pem"));
    let key = directory.join(format!("{name}.key"));
    for path in [&certificate, &key] {
        if path.exists() {
            let what = format!("{} exists already", path.display());
            let failure = CliError::new(Exit::Precondition, what);
            let hint = "--dir DIRECTORY   writes elsewhere\nmove the file away to replace it";
            return Err(failure.hint(hint).into());
        }
    }
    files::create_directory(directory)
        .with_context(|| format!("create {}", directory.display()))?;
    let write = |path: &Path, text: &str, mode: u32| {
        let written = files::create_new(path, text.as_bytes(), mode);
        written.with_context(|| format!("write {}", path.display()))
    };
    write(&key, &pair.key, 0o600)?;
    write(&certificate, &pair.certificate, 0o644)?;
    files::sync_directory(directory).with_context(|| format!("sync {}", directory.display()))?;
    Ok(CertificateFilesRow { certificate, key })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn keys_are_private_and_files_are_never_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tls");
        make_dev_certificates(&path, 2).unwrap();
        for name in ["ca.key", "node-1.key", "node-2.key", "client-dev.key"] {
            let mode = std::fs::metadata(path.join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        let before = files::read_text(&path.join("node-1.pem")).unwrap();
        make_dev_certificates(&path, 3).unwrap();
        assert_eq!(files::read_text(&path.join("node-1.pem")).unwrap(), before);
        assert!(path.join("node-3.pem").exists());
        let pair = CertificateAuthority::create("dev", 1).unwrap();
        let error = write(&path, "ca", &pair).unwrap_err();
        assert_eq!(crate::exit::of(&error), Exit::Precondition);
        assert!(open(directory.path()).is_err());
    }
}
