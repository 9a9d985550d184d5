// Command standin answers as NVIDIA's MPS programs do, as far as the keeper asks: by the
// name that it is started under. Files in /standin say what is to go wrong.
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

func told(what string) bool {
	_, err := os.Stat("/standin/" + what)
	return err == nil
}

func main() {
	socket := filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control")
	switch {
	case filepath.Base(os.Args[0]) == "nvidia-cuda-mps-server":
		time.Sleep(1 << 62)
	case slices.Contains(os.Args, "-f"):
		serve(socket)
	default:
		ask(socket)
	}
}

func ask(socket string) {
	c, err := net.Dial("unix", socket)
	if err != nil {
		fmt.Println("Cannot find MPS control daemon process")
		os.Exit(1)
	}
	in := bufio.NewReader(os.Stdin)
	line, _ := in.ReadString('\n')
	fmt.Fprint(c, line)
	out := bufio.NewScanner(c)
	for out.Scan() {
		fmt.Println(out.Text())
	}
}

func serve(socket string) {
	if told("refuse") || told("single") && slices.Contains(os.Args, "-multiuser-server") {
		fmt.Println("usage")
		os.Exit(1)
	}
	if os.Remove("/standin/once") == nil {
		fmt.Println("no card is there yet")
		os.Exit(1)
	}
	if told("mute") && slices.Contains(os.Args, "-multiuser-server") {
		os.Exit(1)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	var mu sync.Mutex
	servers := map[int]bool{}
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			line, _ := bufio.NewReader(c).ReadString('\n')
			f := strings.Fields(line)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case len(f) == 0:
			case f[0] == "get_server_list":
				for pid := range servers {
					fmt.Fprintln(c, pid)
				}
				if b, err := os.ReadFile("/standin/others"); err == nil {
					c.Write(b)
				}
			case f[0] == "start_server" && len(servers) == 0 && !told("serverless"):
				cmd := exec.Command("/usr/bin/nvidia-cuda-mps-server")
				cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr // there is no /dev/null
				if name, err := os.ReadFile("/standin/shm"); err == nil {
					// Neither open nor mapped, and of no pid.
					os.WriteFile("/dev/shm/"+string(name), nil, 0o600)
				}
				if err := cmd.Start(); err != nil {
					fmt.Fprintln(c, err)
					return
				}
				pid := cmd.Process.Pid
				servers[pid] = true
				go func() {
					cmd.Wait()
					mu.Lock()
					delete(servers, pid)
					mu.Unlock()
				}()
			case f[0] == "get_server_status" && len(f) == 2:
				pid, _ := strconv.Atoi(f[1])
				switch {
				case !servers[pid]:
					fmt.Fprintln(c, "no such server")
				case told("fault"):
					fmt.Fprintln(c, "FAULT")
				case told("flood"):
					fmt.Fprint(c, "FAULT", strings.Repeat("\n\"and more\"", 30_000))
				default:
					fmt.Fprintln(c, "ACTIVE")
				}
			case f[0] == "quit":
				for pid := range servers {
					if p, err := os.FindProcess(pid); err == nil {
						p.Kill()
					}
				}
				os.Exit(0)
			}
		}()
	}
}
