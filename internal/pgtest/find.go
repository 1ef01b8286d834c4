// Package pgtest finds the PostgreSQL server binaries installed on this
// machine and runs private servers with them: throw-away servers for tests, and
// kept ones for command-line tools.
//
// A server started by this package is reachable only through a Unix socket in a
// folder of mode 0700, plus the loopback address when [Options].TCP asks for it.
// It does not outlive the process that started it (on Linux even when that
// process is killed with SIGKILL; elsewhere only when [Server.Stop] is called).
//
// The package does not import "testing", so a command can use it without
// linking the test framework; its test helpers take the small [TB] interface.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// MinMajor is the oldest PostgreSQL major version that [Find] and [Start]
// accept.
const MinMajor = 14

// BinEnv is the environment variable that names the folder of the PostgreSQL
// binaries to use. When it is set, [Find] looks nowhere else.
const BinEnv = "WEIR_PG_BIN"

// ErrNoServer is matched (errors.Is) by the errors of [Find] and [Start] when no
// usable PostgreSQL server binaries were found.
var ErrNoServer = errors.New("no usable PostgreSQL server binaries")

// Binaries describes one installation of the PostgreSQL server.
type Binaries struct {
	Dir     string // absolute folder that holds initdb and postgres
	Major   int    // major version, such as 17
	Version string // version as the server prints it, such as "17.5" or "18beta1"
}

// Find returns the installed PostgreSQL server binaries with the highest major
// version, at least [MinMajor]. With the environment variable WEIR_PG_BIN set it
// considers that folder only. Otherwise it considers, in this order (which
// decides between equal majors): the folder printed by "pg_config --bindir",
// the folders of PATH, and the usual folders of Debian, of the PostgreSQL RPMs,
// of a source build and of Homebrew.
//
// The error matches [ErrNoServer] and says which places were looked at, why each
// was refused and what to do about it. Nothing is cached.
func Find() (Binaries, error) {
	if dir := os.Getenv(BinEnv); dir != "" {
		b, err := inspect(dir)
		if err != nil {
			return Binaries{}, &findError{
				looked: []string{fmt.Sprintf("%s=%s: %v", BinEnv, dir, err)},
				remedy: "set " + BinEnv + " to a folder that holds initdb and postgres, or unset it",
			}
		}
		return b, nil
	}

	var (
		looked []string
		best   Binaries
		seen   = map[string]bool{}
	)
	try := func(origin, dir string, quiet bool) {
		if dir == "" || seen[filepath.Clean(dir)] {
			return
		}
		seen[filepath.Clean(dir)] = true
		b, err := inspect(dir)
		if err != nil {
			// Most folders of PATH hold no server: naming each of them would
			// bury the lines that matter.
			if !quiet || !errors.Is(err, os.ErrNotExist) {
				looked = append(looked, fmt.Sprintf("%s %s: %v", origin, dir, err))
			}
			return
		}
		if b.Major > best.Major {
			best = b
		}
	}

	if dir, err := pgConfigBindir(); err != nil {
		looked = append(looked, fmt.Sprintf("pg_config --bindir: %v", err))
	} else {
		try("pg_config --bindir", dir, false)
	}
	path := os.Getenv("PATH")
	for _, dir := range filepath.SplitList(path) {
		if filepath.IsAbs(dir) {
			try("PATH", dir, true)
		}
	}
	looked = append(looked, fmt.Sprintf("PATH (%s): no other folder holds initdb and postgres", path))
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",
		"/usr/pgsql-*/bin",
		"/usr/local/pgsql/bin",
		"/opt/homebrew/opt/postgresql@*/bin",
	} {
		dirs, _ := filepath.Glob(pattern) // only a malformed pattern is an error
		if len(dirs) == 0 {
			looked = append(looked, pattern+": no such folder")
		}
		for _, dir := range dirs {
			try("folder", dir, false)
		}
	}
	if best.Major == 0 {
		return Binaries{}, &findError{looked: looked, remedy: remedy()}
	}
	return best, nil
}

// findError keeps the list of the places looked at apart from the remedy so
// that the message reads as a list.
type findError struct {
	looked []string
	remedy string
}

func (e *findError) Error() string {
	return fmt.Sprintf("pgtest: %v (need initdb and postgres, version %d or newer); looked at:\n\t%s\nremedy: %s",
		ErrNoServer, MinMajor, strings.Join(e.looked, "\n\t"), e.remedy)
}

func (e *findError) Unwrap() error { return ErrNoServer }

func remedy() string {
	install := "install the PostgreSQL server"
	switch {
	case runtime.GOOS == "darwin":
		install = `install it with "brew install postgresql@17"`
	case fileExists("/etc/debian_version"):
		install = `install it with "apt-get install postgresql"`
	case fileExists("/etc/redhat-release"):
		install = `install it with "dnf install postgresql-server"`
	case runtime.GOOS == "linux":
		install = `install the PostgreSQL server ("apt-get install postgresql" on Debian)`
	}
	return install + ", or set " + BinEnv + " to the folder that holds initdb and postgres"
}

func fileExists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func pgConfigBindir() (string, error) {
	name, err := exec.LookPath("pg_config")
	if err != nil {
		return "", errors.New("pg_config is not in PATH")
	}
	out, err := shortOutput(name, "--bindir")
	return strings.TrimSpace(out), err
}

// inspect reads the version of the server binaries in dir, and refuses a folder
// without both binaries or with a version that is too old.
func inspect(dir string) (Binaries, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Binaries{}, err
	}
	for _, name := range []string{"postgres", "initdb"} {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return Binaries{}, fmt.Errorf("holds no %s: %w", name, os.ErrNotExist)
			}
			return Binaries{}, err
		}
		if st.IsDir() || st.Mode()&0o111 == 0 {
			return Binaries{}, fmt.Errorf("%s is not an executable file", name)
		}
	}
	out, err := shortOutput(filepath.Join(dir, "postgres"), "--version")
	if err != nil {
		return Binaries{}, fmt.Errorf("postgres --version: %w", err)
	}
	b, err := parseVersion(out)
	if err != nil {
		return Binaries{}, err
	}
	if b.Major < MinMajor {
		return Binaries{}, fmt.Errorf("version %s is older than %d", b.Version, MinMajor)
	}
	b.Dir = dir
	return b, nil
}

// parseVersion reads a line such as "postgres (PostgreSQL) 15.13 (Debian ...)".
func parseVersion(line string) (Binaries, error) {
	_, rest, ok := strings.Cut(line, ") ")
	if !ok {
		return Binaries{}, fmt.Errorf("cannot read the version in %q", strings.TrimSpace(line))
	}
	version, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	digits := 0
	for digits < len(version) && version[digits] >= '0' && version[digits] <= '9' {
		digits++
	}
	major, err := strconv.Atoi(version[:digits])
	if err != nil {
		return Binaries{}, fmt.Errorf("cannot read the version in %q", strings.TrimSpace(line))
	}
	return Binaries{Major: major, Version: version}, nil
}

// shortOutput runs a command that only prints something.
func shortOutput(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && len(exit.Stderr) > 0 {
			return "", fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
		}
		return "", err
	}
	return string(out), nil
}
