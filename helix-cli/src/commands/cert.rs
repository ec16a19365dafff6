//! `helix cert`: makes the certificates of a cluster. Connects to no cluster.
//! Never overwrites a file; only a dev cluster renews its certificates. Only the user can read the
//! keys.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use helix_tls::issue::{CertificateAuthority, IssuedPair};
use helix_tls::{CertificateFiles, CertificateInfo, CertificateStore};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{CaArgs, CertSubcommand, ClientCertArgs, GlobalArgs, NODES_MAX, NodeCertArgs};
use crate::exit::{CliError, Exit};
use crate::files;
use crate::output::Output;

/// Name of the certificate of a dev cluster's client.
const DEV_CLIENT: &str = "client-dev";

/// Seconds before its expiry from which on a certificate of a dev cluster is renewed at the start.
const DEV_RENEWAL_SECONDS: i64 = 24 * 3600;

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
/// directory has them. Renews those that expire within a day, and all of them if the CA does.
///
/// # Errors
/// Fails if a file cannot be read or written, or if the directory has only some of them.
pub(crate) fn make_dev_certificates(directory: &Path, nodes: u64) -> anyhow::Result<()> {
    files::create_private_directory(directory)
        .with_context(|| format!("create {}", directory.display()))?;
    let node_name = |node: u64| format!("node-{node}");
    if ends_soon(&directory.join("ca.pem"))? {
        // Another CA makes the certificates of this one useless.
        for node in 1..=u64::from(NODES_MAX) {
            remove(directory, &node_name(node))?;
        }
        remove(directory, DEV_CLIENT)?;
    }
    make_dev_pair(directory, "ca", || CertificateAuthority::create("dev", 365))?;
    let ca = open(directory)?;
    let hosts = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    for node in 1..=nodes {
        make_dev_pair(directory, &node_name(node), || ca.node(node, &hosts, 365))?;
    }
    make_dev_pair(directory, DEV_CLIENT, || ca.client("dev", 365))
}

/// Makes a certificate, unless the directory has a certificate that is valid for another day.
fn make_dev_pair(
    directory: &Path,
    name: &str,
    issue: impl FnOnce() -> Result<IssuedPair, String>,
) -> anyhow::Result<()> {
    let path = directory.join(format!("{name}.pem"));
    if ends_soon(&path)? {
        remove(directory, name)?;
    }
    if path.exists() {
        return Ok(());
    }
    write(directory, name, &issue().map_err(usage)?).map(drop)
}

/// Returns true if there is a certificate and it expires within a day.
fn ends_soon(path: &Path) -> anyhow::Result<bool> {
    if !path.exists() {
        return Ok(false);
    }
    // The store reads any certificate as a CA, and needs no key for it.
    let files = CertificateFiles { ca: vec![path.to_owned()], ..CertificateFiles::default() };
    let set = CertificateStore::open(files, None)?.current();
    let seconds_left = set.certificates().iter().map(CertificateInfo::seconds_left).min();
    Ok(seconds_left.is_some_and(|seconds| seconds <= DEV_RENEWAL_SECONDS))
}

/// Removes a certificate and its key. The key goes first: a certificate that is left over ends
/// soon, so that the next start makes both.
fn remove(directory: &Path, name: &str) -> anyhow::Result<()> {
    for suffix in ["key", "pem"] {
        let path = directory.join(format!("{name}.{suffix}"));
        files::remove(&path).with_context(|| format!("remove {}", path.display()))?;
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

    #[test]
    fn dev_certificates_that_expire_soon_are_renewed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        make_dev_certificates(path, 2).unwrap();
        let read = |name: &str| files::read_text(&path.join(name)).unwrap().unwrap();
        let put = |name: &str, pair: &IssuedPair| {
            for (suffix, text) in [("pem", &pair.certificate), ("key", &pair.key)] {
                files::replace(&path.join(format!("{name}.{suffix}")), text.as_bytes()).unwrap();
            }
        };
        let (ca, second) = (read("ca.pem"), read("node-2.pem"));
        put("node-1", &open(path).unwrap().node(1, &[], 1).unwrap());
        let ending = read("node-1.pem");
        make_dev_certificates(path, 2).unwrap();
        assert_ne!(read("node-1.pem"), ending);
        assert_eq!((read("ca.pem"), read("node-2.pem")), (ca, second.clone()));
        // The other certificates follow the CA.
        put("ca", &CertificateAuthority::create("dev", 0).unwrap());
        make_dev_certificates(path, 2).unwrap();
        assert_ne!(read("node-2.pem"), second);
        assert!(!ends_soon(&path.join("ca.pem")).unwrap());
        let mode = std::fs::metadata(path.join("ca.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
