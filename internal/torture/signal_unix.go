//go:build unix

package torture

import (
	"os/exec"
	"syscall"
)

const canSignal = true

// apart keeps an interrupt typed at the terminal from a process: it goes on until everything is handled.
func apart(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func killProcess(pid int) error   { return syscall.Kill(pid, syscall.SIGKILL) }
func stopProcess(pid int) error   { return syscall.Kill(pid, syscall.SIGSTOP) }
func resumeProcess(pid int) error { return syscall.Kill(pid, syscall.SIGCONT) }
