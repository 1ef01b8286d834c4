//go:build unix

package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// account is the operating system user that the server runs as. A nil account
// means the user of this process.
type account struct {
	name     string
	uid, gid uint32
}

func (u *account) credential() *syscall.Credential {
	if u == nil {
		return nil
	}
	return &syscall.Credential{Uid: u.uid, Gid: u.gid}
}

// chown hands a file over to the account.
func (u *account) chown(name string) error {
	if u == nil {
		return nil
	}
	return os.Lchown(name, int(u.uid), int(u.gid))
}

// chownFile is chown for an open file, which cannot be swapped for another.
func (u *account) chownFile(f *os.File) error {
	if u == nil {
		return nil
	}
	return f.Chown(int(u.uid), int(u.gid))
}

// serverAccount chooses whom the server runs as: PostgreSQL refuses to run as
// root.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		return accountOf(u)
	}
	return nil, errors.New(`PostgreSQL refuses to run as root and this machine has neither a user "postgres" nor "nobody" to run it as`)
}

func accountOf(u *user.User) (*account, error) {
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", u.Username, err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", u.Username, err)
	}
	return &account{name: u.Username, uid: uint32(uid), gid: uint32(gid)}, nil
}

// ownerAccount returns the account to run a server as on an existing data
// folder, which PostgreSQL wants to be owned by exactly that user.
func ownerAccount(dir string) (*account, error) {
	st, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, fmt.Errorf("cannot read the owner of %s", dir)
	}
	if euid := os.Geteuid(); euid != 0 {
		if int(sys.Uid) != euid {
			return nil, fmt.Errorf("data folder %s is owned by user id %d, not by the current user (id %d)", dir, sys.Uid, euid)
		}
		return nil, nil
	}
	if sys.Uid == 0 {
		want, err := serverAccount()
		if err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("data folder %s is owned by root, and PostgreSQL refuses to run as root; remedy: chown -R %s %s", dir, want.name, dir)
	}
	if u, err := user.LookupId(strconv.Itoa(int(sys.Uid))); err == nil {
		return accountOf(u)
	}
	return &account{name: "#" + strconv.Itoa(int(sys.Uid)), uid: sys.Uid, gid: sys.Gid}, nil
}

// reachable reports whether the account can enter dir. It tries instead of
// computing: access lists and mount options count too.
func (u *account) reachable(dir string) error {
	if u == nil {
		return nil
	}
	cmd := exec.Command("/bin/sh", "-c", `cd -- "$0"`, dir)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: u.credential()}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Errorf("user %s, whom PostgreSQL runs as because this process is root, cannot enter %s (%s): one of its parent folders is closed to other users", u.name, dir, strings.TrimSpace(string(out)))
	}
	if err != nil {
		return fmt.Errorf("running as user %s: %w", u.name, err)
	}
	return nil
}

// processInfo is one process of the machine.
type processInfo struct {
	pid, ppid int
	command   string
	start     string // start time, tells a process from a later one with the same id
	zombie    bool   // already ended; only its parent's acknowledgement is missing
	stopped   bool
}

// findProcess returns the live process with this id.
func findProcess(list []processInfo, pid int) (processInfo, bool) {
	for _, p := range list {
		if p.pid == pid && !p.zombie {
			return p, true
		}
	}
	return processInfo{}, false
}

// isPostgres reports whether pid is a live process that runs PostgreSQL. After a
// crash of the machine, the id in a stale postmaster.pid may belong to anyone.
func isPostgres(pid int) bool {
	list, err := processes()
	if err != nil {
		return syscall.Kill(pid, 0) == nil
	}
	p, ok := findProcess(list, pid)
	return ok && (strings.HasPrefix(p.command, "postgres") || strings.HasPrefix(p.command, "postmaster"))
}

// descendants returns the live descendants of pid, without pid itself.
func descendants(list []processInfo, pid int) []processInfo {
	var found []processInfo
	parents := map[int]bool{pid: true}
	for grown := true; grown; {
		grown = false
		for _, p := range list {
			if parents[p.ppid] && !parents[p.pid] {
				parents[p.pid] = true
				grown = true
				if !p.zombie {
					found = append(found, p)
				}
			}
		}
	}
	return found
}

// killTree ends pid and its descendants with SIGKILL and waits until none of
// them is left.
func killTree(ctx context.Context, pid int) (err error) {
	// A stopped postmaster starts no more backends, so the list is complete.
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("stopping process %d: %w", pid, err)
	}
	defer func() {
		if err != nil {
			syscall.Kill(pid, syscall.SIGKILL) // it must not stay stopped
		}
	}()
	var list []processInfo
	for range 1000 {
		if list, err = processes(); err != nil {
			return fmt.Errorf("listing processes: %w", err)
		}
		if p, ok := findProcess(list, pid); !ok || p.stopped {
			break
		}
		time.Sleep(time.Millisecond)
	}
	victims := descendants(list, pid)
	if p, ok := findProcess(list, pid); ok {
		victims = append([]processInfo{p}, victims...)
	}
	for {
		for _, v := range victims {
			if err := syscall.Kill(v.pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("killing process %d: %w", v.pid, err)
			}
		}
		list, err := processes()
		if err != nil {
			return fmt.Errorf("listing processes: %w", err)
		}
		var left []processInfo
		for _, v := range victims {
			if p, ok := findProcess(list, v.pid); ok && p.start == v.start {
				left = append(left, v)
			}
		}
		if victims = left; len(victims) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d killed processes are still there: %w", len(victims), context.Cause(ctx))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

const (
	fastShutdown      = syscall.SIGINT
	immediateShutdown = syscall.SIGQUIT
)

// openNoFollow is a flag for opening files as root in a folder that belongs to
// another user.
const openNoFollow = syscall.O_NOFOLLOW

// tryLock takes the advisory lock of an open file if it is free. The kernel
// releases it when this process ends, however it ends.
func tryLock(f *os.File) bool {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
}

// commandAttr is for commands that the caller launches from any thread: those
// cannot be tied to the life of one thread.
func commandAttr(u *account) *syscall.SysProcAttr {
	if u == nil {
		return nil
	}
	return &syscall.SysProcAttr{Credential: u.credential()}
}
