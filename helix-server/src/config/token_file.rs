//! The file of the first token, readable by its owner only.

// Creates and removes the file.
#![allow(clippy::disallowed_methods)]

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Bytes that are read of a file.
const BYTES_MAX: u64 = 4 << 10;

/// A file with one secret, with the mode 0600.
#[derive(Debug, Clone)]
pub struct SecretFile {
    path: PathBuf,
}

impl SecretFile {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the secret and makes it durable. Replaces the file at once, so that it never has
    /// another mode or a part of the secret.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, secret: &str) -> io::Result<()> {
        let directory = self.path.parent().filter(|path| !path.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        fs::create_dir_all(directory)?;
        let name = self.path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut new_name = name.to_owned();
        new_name.push(".new");
        let new_path = self.path.with_file_name(new_name);
        match fs::remove_file(&new_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new_path)?;
        file.write_all(secret.as_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fs::rename(&new_path, &self.path)?;
        fs::File::open(directory)?.sync_all()
    }

    /// Returns the secret; `None` if the file cannot be read or is too long for one.
    pub fn read(&self) -> Option<String> {
        let mut text = String::new();
        fs::File::open(&self.path).ok()?.take(BYTES_MAX).read_to_string(&mut text).ok()?;
        Some(text.trim().to_owned())
    }

    /// Removes the file, if it can be.
    pub fn remove(&self) {
        // Ignored: the secret in it is of no use.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_file_is_private_also_when_it_replaces_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data/admin-token");
        let file = SecretFile::new(&path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(path.with_file_name("admin-token.new"), "left by a crash").unwrap();
        file.write("secret").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "secret\n");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(file.read().as_deref(), Some("secret"));
        file.remove();
        assert!(!path.exists());
        assert_eq!(file.read(), None);
        file.remove();
    }
}
